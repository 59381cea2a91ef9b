"""Frequencies of the rotation, against the plain forward pass, which agrees with llama.cpp, and transformers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from lowbit.runtime.model.config import Config
from lowbit.runtime.model.gguf_file import GgufFile
from lowbit.runtime.model.rope import Rope, Yarn
from plain_llama import Plain
from tiny_models import write_model

SCALINGS = {
    "none": {},
    "named none": {"rope.scaling.type": "none", "rope.scaling.factor": 2.5},
    "linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5},
    "without a type": {"rope.scaling.factor": 2.5},
    "old name": {"rope.scale_linear": 2.5},
    "zero for none": {"rope.scaling.factor": 0.0},
    "yarn": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 2048},
    "yarn of its context": {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0},
    "yarn with other bounds": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_beta_fast": 8.0,
        "rope.scaling.yarn_beta_slow": 2.0,
        "rope.scaling.attn_factor": 0.9,
    },
}


@pytest.mark.parametrize("metadata", SCALINGS.values(), ids=SCALINGS.keys())
@pytest.mark.parametrize("dims", [64, 48, 2])
@pytest.mark.parametrize("factored", [False, True])
def test_scalings(tmp_path, metadata, dims, factored):
    factors = np.linspace(1, 8, dims // 2) if factored else None
    settings = {**metadata, "rope.dimension_count": dims, "rope.freq_base": 3e4}
    path = write_model(
        tmp_path / "m.gguf", layers=1, heads=1, kv_heads=1, context=1024, metadata=settings, rope_factors=factors
    )
    with GgufFile(path) as file:
        rope = Config.read(file).rope
    frequencies, scale = Plain(path).frequencies()
    assert rope.frequencies().dtype == np.float32
    np.testing.assert_allclose(rope.frequencies(), frequencies, rtol=1e-6)
    assert rope.scale == pytest.approx(scale, rel=1e-6)
    if "none" not in str(metadata) and metadata and metadata.get("rope.scaling.factor") != 0.0:
        plain = Rope(dims, 3e4, factors=rope.factors).frequencies()
        assert (rope.frequencies() < plain).any() or dims == 2


def test_yarn_leaves_fast_pairs_and_divides_slow_ones():
    """By definition: pairs with more than 32 turns in the original context keep their frequency."""
    rope = Rope(128, 1e4, 4.0, Yarn(4096))
    plain, scaled = Rope(128, 1e4).frequencies(), rope.frequencies()
    turns = plain * 4096 / (2 * np.pi)
    np.testing.assert_allclose(scaled[turns > 40], plain[turns > 40], rtol=1e-6)
    np.testing.assert_allclose(scaled[turns < 0.8], plain[turns < 0.8] / 4, rtol=1e-6)
    assert all(a >= b for a, b in itertools.pairwise(scaled))


def test_yarn_is_that_of_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "rope_theta": 5e5,
    }
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=32768, rope_parameters=parameters
    )
    wanted, scale = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    rope = Rope(128, 5e5, 8.0, Yarn(4096, 16.0, 2.0))
    np.testing.assert_allclose(rope.frequencies(), wanted.numpy(), rtol=1e-5)
    assert scale == pytest.approx(1 + 0.1 * np.log(8.0))
