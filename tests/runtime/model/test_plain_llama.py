"""The plain forward pass that decoding is compared with, against implementations that others wrote."""

from __future__ import annotations

import numpy as np
import pytest
from plain_llama import Plain, logits
from tiny_models import ARCHITECTURES, write_model

YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 2048,
}
TOKENS = [int(token) for token in np.random.default_rng(1).integers(3, 280, 40)]

MODELS = {
    "grouped": {},
    "not grouped": {"kv_heads": 4},
    "a head of its own": {"tied": False},
    "linear": {"metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}},
    "linear by its old name": {"metadata": {"rope.scale_linear": 2.5}},
    "unscaled": {"metadata": {"rope.scaling.type": "none", "rope.scaling.factor": 2.5}},
    "yarn": {"metadata": YARN, "heads": 1, "kv_heads": 1},
    "yarn with attention factor": {"metadata": {**YARN, "rope.scaling.attn_factor": 0.8}, "heads": 1, "kv_heads": 1},
    "another base": {"metadata": {"rope.freq_base": 5e5}},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS.keys())
def test_agrees_with_llama_cpp(tmp_path, architecture, settings):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = write_model(tmp_path / "m.gguf", architecture=architecture, **settings)
    _agree_with_llama_cpp(llama_cpp, path)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_factors": [1, 1, 1.5, 2, 4, 6, 8, 8]},
        {"rope_factors": [1, 1, 1.5, 2, 4, 6, 8, 8], "metadata": YARN},
        {"biases": True},
        {"head_dim": 32},
        {"types": {"ffn": "Q4_1", "attn": "Q8_0", "": "F16"}},
    ],
    ids=["factors", "factors and yarn", "biases", "wide heads", "quantised"],
)
def test_llama_files_agree_with_llama_cpp(tmp_path, settings):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    # Quantised weights make llama.cpp quantise activations to eight bits.
    tolerance = 0.5 if "types" in settings else 1e-4
    _agree_with_llama_cpp(llama_cpp, write_model(tmp_path / "m.gguf", **settings), tolerance)


def _agree_with_llama_cpp(llama_cpp, path, tolerance=1e-4):
    model = llama_cpp.Llama(str(path), logits_all=True, n_ctx=64, verbose=False, n_threads=1, type_k=0, type_v=0)
    model.eval(TOKENS)
    wanted = logits(path, TOKENS)
    assert wanted.std() > 1
    np.testing.assert_allclose(model.scores[: len(TOKENS)], wanted, rtol=0, atol=tolerance)
    model.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_agrees_with_transformers(tmp_path, architecture):
    settings = {"head_dim": 128, "width": 48, "heads": 3, "kv_heads": 1} if architecture == "qwen3" else {}
    path = write_model(tmp_path / "m.gguf", architecture=architecture, **settings)
    np.testing.assert_allclose(_transformers_logits(path, TOKENS), logits(path, TOKENS), rtol=0, atol=1e-4)


def test_agrees_with_transformers_on_a_real_model(smollm2):
    tokens = [504, 3285, 282, 4649, 314, 7042, 30, 198, 1, 4093, 198]
    np.testing.assert_allclose(_transformers_logits(smollm2, tokens), logits(smollm2, tokens), rtol=0, atol=2e-3)


def _transformers_logits(path, tokens):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double().numpy()


def test_a_window_hides_what_is_older(tmp_path):
    """Attention that reaches back two tokens: with one layer, logits depend on the last two tokens and nothing else."""
    path = write_model(tmp_path / "m.gguf", layers=1, metadata={"attention.sliding_window": 2})
    model = Plain(path)
    # The rotation is relative, so positions do not matter.
    np.testing.assert_allclose(model.logits([5, 6, 7, 8])[-1], model.logits([9, 7, 8])[-1], atol=1e-9)
    assert np.abs(model.logits([5, 6, 7, 8])[-1] - model.logits([5, 6, 9, 8])[-1]).max() > 0.01
