"""What a file's metadata and tensors say of a model, and which files are refused."""

from __future__ import annotations

import numpy as np
import pytest
from lowbit.kernels.errors import ModelError
from lowbit.runtime.model.config import ARCHITECTURES, Config
from lowbit.runtime.model.gguf_file import GgufFile
from lowbit.runtime.model.weights import exact, vector
from plain_llama import Plain
from tiny_models import ARCHITECTURES as WRITTEN
from tiny_models import write_model


def read(path, **settings):
    with GgufFile(write_model(path / "m.gguf", **settings)) as file:
        return Config.read(file)


def test_all_architectures_are_tried_here():
    assert set(WRITTEN) == set(ARCHITECTURES)


def test_the_real_file(smollm2):
    """The figures of the model's published config.json."""
    with GgufFile(smollm2) as file:
        config = Config.read(file)
    assert (config.architecture, config.layers, config.width, config.hidden) == ("llama", 30, 576, 1536)
    assert (config.heads, config.kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocabulary, config.context, config.window, config.tied) == (49152, 8192, 0, True)
    assert config.norm_eps == pytest.approx(1e-5)
    assert (config.rope.dims, config.rope.base, config.rope.factor, config.rope.scale) == (64, 1e5, 1.0, 1.0)
    assert not config.qk_norm and not config.qkv_bias


@pytest.mark.parametrize("architecture", WRITTEN)
@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "head_dim"), [(64, 4, 4, None), (96, 3, 1, 80), (192, 2, 1, None), (96, 4, 2, 128)]
)
@pytest.mark.parametrize("tied", [True, False])
def test_geometry(tmp_path, architecture, width, heads, kv_heads, head_dim, tied):
    config = read(
        tmp_path,
        architecture=architecture,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=40,
        layers=3,
        tied=tied,
    )
    assert (config.width, config.heads, config.kv_heads, config.layers) == (width, heads, kv_heads, 3)
    assert (config.head_dim, config.hidden, config.tied) == (head_dim or width // heads, 40, tied)
    assert config.qkv_bias == (architecture == "qwen2")
    assert config.qk_norm == (architecture == "qwen3")


def test_a_count_for_each_layer_may_be_given_where_all_are_equal(tmp_path):
    assert read(tmp_path, metadata={"attention.head_count_kv": [2, 2]}).kv_heads == 2
    with pytest.raises(ModelError, match=r"head_count_kv differs from layer to layer"):
        read(tmp_path, metadata={"attention.head_count_kv": [2, 1]})


def test_a_window_is_told(tmp_path):
    assert read(tmp_path, metadata={"attention.sliding_window": 48}).window == 48


def test_what_changes_nothing_is_accepted(tmp_path):
    assert read(tmp_path, metadata={"expert_count": 0, "logit_scale": 1.0, "attention.causal": True}).layers == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"architecture": "gemma3"}, r"architecture 'gemma3' is unsupported \(supported: llama, qwen2, qwen3\)"),
        ({"architecture": "smollm3"}, "architecture 'smollm3' is unsupported"),
        ({"omit": ["blk.1.ffn_up.weight"]}, r"tensor 'blk\.1\.ffn_up\.weight' is missing"),
        ({"omit": ["token_embd.weight"]}, r"tensor 'token_embd\.weight' is missing"),
        ({"omit": ["output_norm.weight"]}, r"tensor 'output_norm\.weight' is missing"),
        ({"architecture": "qwen3", "omit": ["blk.0.attn_k_norm.weight"]}, r"attn_k_norm\.weight' is missing"),
        ({"architecture": "qwen2", "omit": ["blk.1.attn_v.bias"]}, r"attn_v\.bias' is missing"),
        ({"metadata": {"block_count": None}}, r"llama\.block_count is missing"),
        ({"metadata": {"block_count": 3}}, r"tensor 'blk\.2\.attn_norm\.weight' is missing"),
        ({"metadata": {"block_count": 1}}, r"tensor 'blk\.1\.attn_norm\.weight' has no place"),
        ({"metadata": {"block_count": 4_000_000_000}}, r"block_count must be a number from 1 to 4096, not 4000000000"),
        ({"metadata": {"block_count": "two"}}, r"block_count must be a number from 1 to 4096, not 'two'"),
        ({"metadata": {"block_count": True}}, r"block_count must be a number from 1 to 4096, not True"),
        ({"metadata": {"embedding_length": None}}, r"embedding_length is missing"),
        ({"metadata": {"embedding_length": 128}}, r"tensor 'token_embd\.weight' has 288 rows of 64"),
        ({"metadata": {"feed_forward_length": 95}}, r"ffn_gate\.weight' has 96 rows of 64, its metadata ask for 95"),
        ({"metadata": {"attention.head_count": 0}}, r"head_count must be a number from 1"),
        ({"metadata": {"attention.head_count": 3}}, r"3 query heads do not divide into 2"),
        ({"metadata": {"attention.head_count": 6}}, r"64 channels does not divide into 6 heads"),
        ({"metadata": {"attention.key_length": 32}}, r"attn_q\.weight' has 64 rows of 64, its metadata ask for 128"),
        ({"metadata": {"attention.value_length": 32}}, r"keys of 16 and values of 32 channels"),
        ({"metadata": {"attention.layer_norm_rms_epsilon": None}}, r"layer_norm_rms_epsilon is missing"),
        ({"metadata": {"attention.layer_norm_rms_epsilon": float("nan")}}, r"rms_epsilon must be a number from 0"),
        ({"metadata": {"context_length": None}}, r"context_length is missing"),
        ({"metadata": {"rope.dimension_count": 17}}, r"rope\.dimension_count must be a number from 2 to 16, not 17"),
        ({"metadata": {"rope.dimension_count": 7}}, r"rope\.dimension_count must be even, not 7"),
        ({"metadata": {"rope.freq_base": 0.0}}, r"rope\.freq_base must be a number"),
        ({"metadata": {"rope.scaling.type": "longrope"}}, r"rope\.scaling\.type 'longrope' is unsupported"),
        ({"metadata": {"rope.scaling.type": "yarn", "rope.scaling.factor": 0.5}}, r"factor must be a number from 1"),
        ({"metadata": {"rope.scaling.factor": -2.0}}, r"rope\.scaling\.factor must be a number from 0"),
        ({"rope_factors": [1.0, 2.0]}, r"'rope_freqs\.weight' must hold 8 numbers above zero"),
        ({"rope_factors": [1.0] * 7 + [0.0]}, r"'rope_freqs\.weight' must hold 8 numbers above zero"),
        ({"metadata": {"split.count": 3}}, r"one of 3 parts of a model: merge them with llama-gguf-split --merge"),
        ({"types": {"ffn_up": "MXFP4", "": "F32"}}, r"ffn_up\.weight' is of type MXFP4, which is unsupported"),
        ({"metadata": {"expert_count": 8}}, r"llama\.expert_count asks for something that is unsupported"),
        ({"metadata": {"attn_logit_softcapping": 50.0}}, r"attn_logit_softcapping asks for"),
        ({"metadata": {"rope.dimension_sections": [1, 2]}}, r"rope\.dimension_sections asks for"),
        (
            {"replace": {"blk.0.attn_output.bias": np.zeros(64, np.float32)}},
            r"'blk\.0\.attn_output\.bias' has no place",
        ),
        ({"replace": {"blk.0.attn_q.weight": np.zeros((64, 32), np.float32)}}, r"attn_q\.weight' has 64 rows of 32"),
        ({"replace": {"output_norm.weight": np.zeros(63, np.float32)}}, r"output_norm\.weight' has 1 rows of 63"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path, settings, said):
    with pytest.raises(ModelError, match=said) as caught:
        read(tmp_path, **settings)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "m.gguf")) and "\n" not in message


@pytest.mark.parametrize(
    "settings", [{}, {"biases": True}, {"metadata": {"rope.dimension_count": 12}}, {"head_dim": 20}]
)
def test_rows_of_q_and_k_come_in_the_order_of_the_rotation(tmp_path, settings):
    """Scores between positions, with pairs half of the rotated channels apart, are those of the file's own order."""
    path = write_model(tmp_path / "m.gguf", layers=1, **settings)
    plain, rng = Plain(path), np.random.default_rng(2)
    x = rng.normal(size=(9, 64))
    wanted_q, wanted_k = (plain._rotated(plain._project("blk.0.", role, x)) for role in "qk")
    with GgufFile(path) as file:
        config = Config.read(file)
        names = [f"blk.0.attn_{role}.weight" for role in "qkv"]
        stack = exact(file, names, config.row_order(names)).astype(np.float64)
        y = x @ stack.T
        if config.qkv_bias:
            biases = [f"blk.0.attn_{role}.bias" for role in "qkv"]
            y += np.concatenate([vector(file, name, config.row_order(name)) for name in biases])
    assert np.array_equal(stack[-len(plain.weight(names[2])) :], plain.weight(names[2]))
    q, k, _ = np.split(y.reshape(9, -1, config.head_dim), [4, 6], axis=1)
    half = config.rope.dims // 2
    angles = np.arange(9)[:, None, None] * config.rope.frequencies().astype(np.float64)

    def rotated(z):
        first, second, rest = z[..., :half], z[..., half : 2 * half], z[..., 2 * half :]
        turned = first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)
        return np.concatenate([*turned, rest], axis=2)

    for head in range(4):
        got = rotated(q)[:, head] @ rotated(k)[:, head // 2].T
        np.testing.assert_allclose(got, wanted_q[:, head] @ wanted_k[:, head // 2].T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_other_architectures_have_that_order_in_the_file(tmp_path, architecture):
    assert read(tmp_path, architecture=architecture).row_order("blk.0.attn_q.weight") is None


def test_only_rows_that_are_rotated_move(tmp_path):
    config = read(tmp_path)
    assert config.row_order("blk.0.attn_v.weight") is None
    assert config.row_order(["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"]) is None
    order = config.row_order("blk.1.attn_k.weight")
    assert sorted(order) == list(range(32))
    assert list(order[:16]) == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
