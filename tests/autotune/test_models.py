"""Attention geometry from presets and from GGUF files, whole and damaged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowbit.autotune.models import PRESETS, Geometry, model_named
from lowbit.kernels.errors import ModelError
from lowbit.kernels.problem import Problem

gguf = pytest.importorskip("gguf")

HIDDEN_SIZE = {
    # heads × head_dim equals the width of the query projection, published separately in each config.json.
    "smollm2-135m": 576,
    "llama-3.2-1b": 2048,
    "llama-3.2-3b": 3072,
    "qwen3-1.7b": 2048,
    "qwen3-8b": 4096,
    "gemma-2-2b": 2048,
    "phi-2": 2560,
}


def write_gguf(path: Path, architecture: str = "llama", tensors: bool = True, **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_token_list(["a", "b", "c"])
    if tensors:
        writer.add_tensor("blk.0.attn_k.weight", np.arange(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def geometry(path: Path) -> tuple[Geometry, ...]:
    return model_named(str(path)).geometries


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_problems_of_the_published_width(name: str) -> None:
    model = model_named(name.upper())
    assert model.name == name
    (shape,) = model.geometries
    assert shape.heads * shape.head_dim == HIDDEN_SIZE[name]
    Problem("attend", shape.heads, shape.kv_heads, shape.head_dim, "w8a8")


def test_matrices_of_a_preset_are_those_of_its_layers() -> None:
    """From the transformer's definition: width × heads·head_dim and back, the feed-forward pair, and the logits."""
    assert [(m.name, m.rows, m.columns) for m in model_named("smollm2-135m").matrices] == [
        ("q, o", 576, 576), ("k, v", 192, 576), ("gate, up", 1536, 576), ("down", 576, 1536), ("head", 49152, 576),
    ]  # fmt: skip
    assert [(m.name, m.rows, m.columns) for m in model_named("gemma-2-2b").matrices] == [
        ("q", 2048, 2304), ("k, v", 1024, 2304), ("o", 2304, 2048),
        ("gate, up", 9216, 2304), ("down", 2304, 9216), ("head", 256000, 2304),
    ]  # fmt: skip
    assert next((m.name, m.rows, m.columns) for m in model_named("phi-2").matrices) == ("q, k, v, o", 2560, 2560)


@pytest.mark.parametrize("name", PRESETS)
def test_matrices_of_every_preset_are_problems(name: str) -> None:
    for matrix in model_named(name).matrices:
        Problem("gemv", 1, 1, matrix.columns, "w4a8")


def test_matrices_of_a_file(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", block_count=2, embedding_length=64, attention__head_count=4, feed_forward_length=160
    )
    assert [(m.name, m.rows, m.columns) for m in model_named(str(path)).matrices] == [
        ("q, k, v, o", 64, 64), ("gate, up", 160, 64), ("down", 64, 160), ("head", 3, 64),
    ]  # fmt: skip


def test_vocabulary_is_the_height_of_the_matrix_where_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_array("llama.feed_forward_length", [96, 128])
    writer.add_token_list(["a", "b", "c"])
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shapes = [(m.name, m.rows, m.columns) for m in model_named(str(path)).matrices]
    assert shapes == [
        ("q, k, v, o", 64, 64), ("gate, up", 96, 64), ("down", 64, 96), ("gate, up", 128, 64), ("down", 64, 128),
        ("head", 8, 64),
    ]  # fmt: skip


def test_matrices_need_what_attention_does_not(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", block_count=2, embedding_length=64, attention__head_count=4)
    model = model_named(str(path))
    assert model.geometries
    with pytest.raises(ModelError, match=r"feed_forward_length.*--rows"):
        model.matrices  # noqa: B018


def test_every_promised_preset_exists() -> None:
    assert set(PRESETS) == set(HIDDEN_SIZE)


def test_head_dim_is_the_key_length_when_there_is_one(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        "qwen3",
        block_count=4,
        embedding_length=1024,
        attention__head_count=16,
        attention__head_count_kv=8,
        attention__key_length=128,
        attention__value_length=128,
    )
    assert geometry(path) == (Geometry(16, 8, 128, layers=4),)


def test_head_dim_follows_from_the_width_otherwise(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", block_count=2, embedding_length=576, attention__head_count=9, attention__head_count_kv=3
    )
    assert geometry(path) == (Geometry(9, 3, 64, layers=2),)


def test_without_head_count_kv_each_head_has_its_own_keys(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "phi2", block_count=2, embedding_length=2560, attention__head_count=32)
    assert geometry(path) == (Geometry(32, 32, 80, layers=2),)


def test_per_layer_heads_give_one_geometry_each_and_skip_layers_without_a_cache(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        block_count=5,
        embedding_length=512,
        attention__head_count=[8, 8, 8, 4, 8],
        attention__head_count_kv=[2, 0, 2, 4, 2],
        attention__key_length=64,
    )
    assert geometry(path) == (Geometry(8, 2, 64, layers=3), Geometry(4, 4, 64, layers=1))


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"embedding_length": 64, "attention__head_count": 4}, "block_count is missing"),
        ({"block_count": 2, "embedding_length": 64}, "attention.head_count is missing"),
        ({"block_count": 2, "attention__head_count": 4}, "embedding_length is missing"),
        ({"block_count": 2, "embedding_length": 66, "attention__head_count": 4}, "does not divide"),
        ({"block_count": 2, "embedding_length": 64, "attention__head_count": [4]}, "each of 2 layers"),
        ({"block_count": 1, "embedding_length": 64, "attention__head_count": 0}, "none of its 1 layers"),
        ({"block_count": 2**32 - 1, "embedding_length": 64, "attention__head_count": 4}, "from 1 to 1048576"),
        (
            {
                "block_count": 1,
                "attention__head_count": 128,
                "attention__key_length": 192,
                "attention__value_length": 128,
            },
            "keys of 192 and values of 128",
        ),
    ],
)
def test_incomplete_metadata_is_named(tmp_path: Path, metadata: dict[str, Any], complaint: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", **metadata)
    with pytest.raises(ModelError, match=complaint) as caught:
        model_named(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_truncation_is_refused_and_leaves_the_file_alone(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", block_count=1, embedding_length=64, attention__head_count=[4]).read_bytes()
    assert geometry(tmp_path / "m.gguf") == (Geometry(4, 4, 16, layers=1),)
    cut = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError) as caught:
            model_named(str(cut))
        assert "\n" not in str(caught.value)
        assert cut.read_bytes() == whole[:length]


def test_flipped_bytes_give_a_geometry_or_one_line(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", block_count=1, embedding_length=64, attention__head_count=[4]).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for position in range(4, len(whole)):
        damaged.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            model_named(str(damaged))
        except ModelError as error:
            assert "\n" not in str(error)


def test_other_files_are_not_gguf(tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(ModelError, match="not a GGUF file"):
        model_named(str(other))
    with pytest.raises(ModelError, match="No such file"):
        model_named(str(tmp_path / "absent.gguf"))
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ModelError, match=r"folder\.gguf"):
        model_named(str(tmp_path / "folder.gguf"))


def test_unknown_names_list_the_presets() -> None:
    with pytest.raises(ModelError, match=r"unknown model 'llama-9'.*smollm2-135m"):
        model_named("llama-9")


def test_shapes_are_read_without_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", block_count=1, embedding_length=64, attention__head_count=4)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert geometry(path) == (Geometry(4, 4, 16, layers=1),)
