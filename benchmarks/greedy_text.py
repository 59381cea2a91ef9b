"""Greedy text beside an implementation in float32.

``python benchmarks/greedy_text.py -m FILE [--tokens 128] [--json]``

The file is read by Hugging Face transformers, which dequantises it to float32, and by `lowbit.Model` with exact weights
and an fp16 cache. Both continue the same prompts, always by the most probable token, be it one that ends a text.
Printed is for each prompt at which token they part, if they do, and how near the two most probable tokens came. Needs
the extra `transformers`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import lowbit
import numpy as np

PROMPTS = (
    "The history of the steam engine begins",
    "Water boils at a lower temperature on a mountain because",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "def fibonacci(n):\n    ",
    "The three largest cities of Italy are",
    "Once there was a lighthouse keeper who",
    "To make bread you need flour,",
    "Q: Why is the sky blue?\nA:",
    "In 1969 two men walked on",
    "A good night's sleep matters, for",
    "Photosynthesis is the process by which",
    "The meeting will begin at nine, and",
    "She opened the old wooden box and found",
    "Prime numbers are those that",
    "import numpy as np\n\n# Compute the mean of each column\n",
    "The difference between weather and climate is",
    "My grandmother used to say that",
    "1. Wash the vegetables.\n2.",
    "Bees are important to farmers because",
    "The train left the station late, so",
)


def reference_model(path: Path) -> Any:
    """The file as transformers reads it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    return model.eval()


def reference_text(model: Any, prompt: list[int], count: int) -> list[int]:
    import torch

    tokens: list[int] = []
    given, past = torch.tensor([prompt]), None
    with torch.no_grad():
        for _ in range(count):
            result = model(given, past_key_values=past, use_cache=True)
            tokens.append(int(result.logits[0, -1].argmax()))
            given, past = torch.tensor([tokens[-1:]]), result.past_key_values
    return tokens


def own_text(model: lowbit.Model, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Tokens, and by how much each one's logit exceeds the next best."""
    session = model.session(len(prompt) + count)
    logits = session.prefill(prompt)
    tokens, leads = [], []
    for position in range(count):
        if position:
            logits = session.step(tokens[-1])
        second, first = np.partition(logits, -2)[-2:]
        tokens.append(int(logits.argmax()))
        leads.append(float(first - second))
    return tokens, leads


def compare(path: Path, prompts: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    theirs, own = reference_model(path), lowbit.Model.load(path, weights="exact")
    rows = []
    for text in prompts:
        prompt = own.tokenizer.encode(text)
        wanted = reference_text(theirs, prompt, count)
        found, leads = own_text(own, prompt, count)
        parted = next((i for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]), None)
        rows.append(
            {"prompt": text, "equal": parted is None, "parted_at": parted, "nearest": min(leads[: _after(parted)])}
        )
        print(rows[-1], file=sys.stderr)
    return rows


def _after(parted: int | None) -> int | None:
    return None if parted is None else parted + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = compare(given.model, PROMPTS, given.tokens)
    equal = sum(row["equal"] for row in rows)
    print(json.dumps({"equal": equal, "rows": rows}, indent=2) if given.json else f"{equal} of {len(rows)} equal")


if __name__ == "__main__":
    main()
