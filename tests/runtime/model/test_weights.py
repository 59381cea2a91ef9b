"""Repacked weights stand for the values that the gguf package dequantises."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.errors import ModelError
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack
from lowbit.kernels.problem import GROUP, Problem
from lowbit.kernels.quantize import Quantized
from lowbit.runtime.model import gguf_file, tensor_types
from lowbit.runtime.model.blocks import parts
from lowbit.runtime.model.config import Config
from lowbit.runtime.model.gguf_file import GgufFile
from lowbit.runtime.model.weights import exact, stacks, vector, weight, weight_format
from tiny_models import SCALE_BYTES, TYPES, random_tensor, write_model

MATRIX = "blk.0.ffn_down.weight"
KINDS = {kind.name: kind for kind in tensor_types.TYPES.values()}


def model(path: Path, kind: str, **settings) -> GgufFile:
    width = 256 if KINDS[kind].block == 256 else 64
    return GgufFile(write_model(path / f"{kind}.gguf", types=kind, width=width, hidden=width, layers=1, **settings))


def of_groups(values, columns):
    """Numbers of groups, one for each column."""
    return np.repeat(values.astype(np.float64), GROUP, axis=1)[:, :columns]


def test_the_table_of_types_is_that_of_the_gguf_package():
    from gguf.constants import GGML_QUANT_SIZES

    for kind, sizes in GGML_QUANT_SIZES.items():
        ours = tensor_types.TYPES[int(kind)]
        assert (ours.name, ours.block, ours.block_bytes) == (kind.name, *sizes)
    assert set(tensor_types.READABLE) == set(TYPES)


@pytest.mark.parametrize("kind", TYPES)
def test_exact_is_what_the_gguf_package_dequantises(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(gguf_file, "CHUNK_BYTES", 3000)
    file = model(tmp_path, kind)
    from gguf import GGUFReader

    tensor = next(t for t in GGUFReader(file.path).tensors if t.name == MATRIX)
    assert np.array_equal(exact(file, MATRIX), dequantize(tensor.data, tensor.tensor_type))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_any_block_of_a_simple_type_keeps_its_values(kind, rows):
    """Bytes at random, scales and minima of either sign, all magnitudes that fp16 has."""
    rng = np.random.default_rng(rows)
    block_bytes = KINDS[kind].block_bytes
    raw = rng.integers(0, 256, (rows, 5, block_bytes), np.uint8)
    for at in (0, 2) if kind == "Q4_1" else (0,):
        numbers = rng.normal(size=(rows, 5)) * 10.0 ** rng.uniform(-8, 3, (rows, 5))
        raw[:, :, at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    raw = raw.reshape(rows, -1)
    wanted = dequantize(raw, GGMLQuantizationType[kind])
    found = parts(raw, KINDS[kind])
    codes, scales = found.codes.astype(np.float64), of_groups(found.scales, 160)
    if kind != "Q4_1":
        assert found.minima is None
        assert np.array_equal((scales * codes).astype(np.float32), wanted)
        return
    minima = of_groups(found.minima, 160)
    # The reference rounds to float32 twice.
    assert (np.abs(scales * (codes + 8) + minima - wanted) <= 2.0**-23 * (np.abs(scales) * 15 + np.abs(minima))).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_codes_of_four_bits_use_their_whole_range(tmp_path, kind):
    found = weight(model(tmp_path, kind), MATRIX)
    assert (found.format, found.quantized.codes.dtype) == ("int4", np.int8)
    assert (found.quantized.codes.min(), found.quantized.codes.max()) == (-8, 7)
    assert (found.minima is None) == (kind == "Q4_0")


def test_q4_k_is_rounded_to_fp16_products(tmp_path):
    file = model(tmp_path, "Q4_K")
    found = weight(file, MATRIX)
    bound = 2.0**-11 * (15 * np.abs(of_groups(found.quantized.scales[0], 256)) + np.abs(of_groups(found.minima, 256)))
    error = np.abs(found.dequantize() - exact(file, MATRIX))
    assert error.max() > 0
    assert (error <= 1.001 * bound + 2.0**-20).all()


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in ("Q4_0", "Q4_1", "Q4_K", "Q8_0")])
def test_other_types_lose_at_most_half_a_step_of_eight_bits(tmp_path, kind):
    file = model(tmp_path, kind)
    found, wanted = weight(file, MATRIX), exact(file, MATRIX).astype(np.float64)
    assert (found.format, found.minima) == ("int8", None)
    largest = np.abs(wanted.reshape(len(wanted), -1, GROUP)).max(axis=2)
    assert (np.abs(found.dequantize() - wanted) <= of_groups(largest, wanted.shape[1]) / 250).all()


@pytest.mark.parametrize("columns", [1, 5, 31, 40, 80, 96])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_may_have_any_number_of_columns(tmp_path, columns, kind):
    file = GgufFile(write_model(tmp_path / "m.gguf", types={"ffn": kind, "": "F32"}, hidden=columns, layers=1))
    found = weight(file, MATRIX)
    assert found.quantized.codes.shape == (1, 64, columns)
    assert found.quantized.scales.shape == (1, 64, -(-columns // 32))
    np.testing.assert_allclose(found.dequantize(), exact(file, MATRIX), atol=np.abs(exact(file, MATRIX)).max() / 250)


def test_stacked_tensors_follow_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "CHUNK_BYTES", 500)
    types = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "": "F16"}
    file = GgufFile(write_model(tmp_path / "m.gguf", types=types, layers=1))
    q, k, v = (f"blk.0.attn_{role}.weight" for role in "qkv")
    assert [weight_format(file, name) for name in (q, k, v)] == ["int4", "int4", "int8"]
    assert stacks(file, (q, k, v)) == [(q, k), (v,)]
    both = weight(file, (q, k))
    assert (both.name, both.rows, both.columns) == (f"{q}+{k}", 96, 64)
    wanted = np.concatenate([exact(file, q), exact(file, k)])
    assert np.array_equal(exact(file, (q, k)), wanted)
    np.testing.assert_allclose(both.dequantize(), wanted, rtol=2.0**-22, atol=1e-7)
    with pytest.raises(ValueError, match="formats differ"):
        weight(file, (q, k, v))
    with pytest.raises(ValueError, match="columns differ"):
        exact(file, (q, "blk.0.ffn_down.weight"))


def test_rows_come_in_the_order_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "CHUNK_BYTES", 500)
    file = model(tmp_path, "Q8_0")
    order = np.random.default_rng(3).permutation(64)
    plain, ordered = weight(file, MATRIX), weight(file, MATRIX, order)
    assert np.array_equal(ordered.dequantize(), plain.dequantize()[order])
    assert np.array_equal(exact(file, MATRIX, order), exact(file, MATRIX)[order])
    norm = vector(file, "output_norm.weight")
    assert norm.dtype == np.float32 and np.array_equal(vector(file, "output_norm.weight", order), norm[order])


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_loading_needs_little_more_memory_than_the_result(tmp_path, kind):
    file = GgufFile(write_model(tmp_path / "m.gguf", types=kind, width=1024, hidden=8192, layers=1))
    weight(file, "blk.0.attn_norm.weight")
    tracemalloc.start()
    try:
        found = weight(file, MATRIX)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    result = found.quantized.codes.nbytes + found.quantized.scales.nbytes
    result += 0 if found.minima is None else found.minima.nbytes
    assert result > 8_000_000
    assert peak - result < 12 * gguf_file.CHUNK_BYTES


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path, kind):
    path = model(tmp_path, kind).path
    at = GgufFile(path).tensor(MATRIX).offset
    raw = bytearray(path.read_bytes())
    scale = SCALE_BYTES.get(kind, (0,))[0]
    if kind in ("F32", "BF16"):
        raw[at : at + 4] = np.array([0x7F800000 if kind == "F32" else 0x7F807F80], np.uint32).tobytes()
    else:
        raw[at + scale : at + scale + 2] = np.array([np.inf], np.float16).tobytes()
    path.write_bytes(raw)
    with GgufFile(path) as file:
        for read in (weight, exact):
            with pytest.raises(ModelError, match=rf"{MATRIX}.*not finite"):
                read(file, MATRIX)


def test_a_file_cut_short_while_it_is_open_is_told(tmp_path):
    file = model(tmp_path, "Q8_0")
    with file.path.open("r+b") as other:
        other.truncate(file.tensor(MATRIX).offset + 10)
    with pytest.raises(ModelError, match=r"truncated.*ffn_down"):
        weight(file, MATRIX)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_kernels_multiply_by_codes_and_scales_as_files_have_them(kind):
    """The code −8 and negative scales, which quantising a cache never makes."""
    rng = np.random.default_rng(5)
    rows, columns = 97, 160
    found = parts(random_tensor(rng, (rows, columns), kind, 0.1), KINDS[kind])
    assert (found.scales < 0).any() or kind == "Q8_0"
    format = "int4" if kind == "Q4_0" else "int8"
    scales = found.scales * rng.choice([-1, 1], found.scales.shape).astype(np.float16)
    quantized = Quantized(format, found.codes[None], scales[None])
    packing = "int4/contiguous/offset" if format == "int4" else "int8/bytes/signed"
    layout = Layout.parse(f"T/16 D/8 t16 d8 | {packing}" if format == "int4" else f"T/16 D/4 t16 d4 | {packing}")
    problem = Problem("gemv", 1, 1, columns, "w4a8" if format == "int4" else "w8a8", 1)
    kernel = CpuBackend().compile(problem, Candidate(layout, None, "integer", Schedule(1, 1, 32, 1, 0, 1)))
    x = rng.normal(size=(1, columns)).astype(np.float32)
    result = kernel(x[None], pack(quantized, layout), tokens=rows)[0, 0]
    wanted = quantized.dequantize()[0] @ x[0].astype(np.float64)
    # Activations are rounded to 127 steps: the error of a dot product of as many independent roundings.
    spread = np.abs(x).max() / 127 / np.sqrt(12) * np.linalg.norm(quantized.dequantize()[0], axis=1)
    assert (np.abs(result - wanted) < 6 * spread).all()


def test_the_real_file(smollm2):
    """Every tensor of SmolLM2 stands for exactly what it did."""
    from gguf import GGUFReader

    tensors = {tensor.name: tensor for tensor in GGUFReader(smollm2).tensors}
    with GgufFile(smollm2) as file:
        config = Config.read(file)
        for name, rows, _ in config.shapes():
            if rows == 1 or (name.startswith("blk.") and not name.startswith(("blk.0.", "blk.29."))):
                continue
            wanted = dequantize(tensors[name].data, tensors[name].tensor_type)
            order = config.row_order(name)
            found = weight(file, name, order).dequantize()
            assert np.array_equal(found, wanted if order is None else wanted[order]), name
