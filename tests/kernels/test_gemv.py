"""A packed matrix times vectors: every packing and pipeline, awkward rows, columns and numbers of vectors."""

import functools
import itertools

import numpy as np
import pytest
from kernel_check import agree
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.cpu.activations import in_place, prepare_symbol, prepare_text, stretches
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.cpu.isa import detect
from lowbit.kernels.cpu.keys import preparation
from lowbit.kernels.cpu.spec import TileSpec
from lowbit.kernels.errors import LayoutError, ProblemError, QuantizationError
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack
from lowbit.kernels.packing import packings
from lowbit.kernels.problem import PRECISIONS, Problem
from lowbit.kernels.reference import make_operands

ROWS = (1, 31, 32, 33, 97)
COLUMNS = (8, 40, 64, 96, 2048)
VECTORS = (1, 3, 4, 7, 16)
PACKINGS = [packing for precision in PRECISIONS.values() for packing in packings(precision.format)]
CASES = [
    (packing.name, pipeline)
    for packing in PACKINGS
    for pipeline in ("integer", "float")
    if pipeline == "float" or packing.format != "fp16"
]


def precision_of(layout):
    return next(p.name for p in PRECISIONS.values() if p.format == layout.packing.format)


def gemv(layout, columns, vectors, pipeline, **schedule):
    settings = {"rows": min(4, vectors), "registers": 2, "block": 32, "splits": 2, "prefetch": 0, "threads": 1}
    problem = Problem("gemv", 1, 1, columns, precision_of(layout), vectors)
    candidate = Candidate(layout, None, pipeline, Schedule(**{**settings, **schedule}))
    return problem, CpuBackend().compile(problem, candidate)


def feasible(name, columns, pipeline):
    """The first of a few layouts of a packing that this machine's registers can be fed from."""
    for order in ("T/16 D/8 t16 d8", "T/16 D/4 t16 d4", "T/32 D/32 t32 d32", "T D"):
        layout = Layout.parse(f"{order} | {name}")
        problem = Problem("gemv", 1, 1, columns, precision_of(layout))
        candidate = Candidate(layout, None, pipeline, Schedule(1, 2, 32, 1, 0, 1))
        try:
            CpuBackend().tiles(problem, candidate)
        except LayoutError:
            continue
        except Exception as error:
            if type(error).__name__ != "CompileError":
                raise
            continue
        return layout
    return None


@pytest.mark.parametrize(("name", "pipeline"), CASES)
def test_every_packing_agrees_with_float64(name, pipeline):
    start = CASES.index((name, pipeline))
    tried = 0
    for i, columns in enumerate(COLUMNS):
        layout = feasible(name, columns, pipeline)
        if layout is None:
            continue
        for vectors in {VECTORS[(start + i) % 5], VECTORS[(start + i + 2) % 5]}:
            problem, kernel = gemv(layout, columns, vectors, pipeline)
            operands = make_operands(problem, max(ROWS), seed=start)
            matrix = kernel.pack("k", operands.k)
            for rows in ROWS:
                result = kernel(operands.x, matrix, tokens=rows)
                assert result.shape == (1, vectors, rows)
                what = f"{name} {pipeline} {rows}x{columns}, {vectors} vectors"
                agree(problem, operands.first(rows), pipeline, result, what)
                tried += 1
    assert tried


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("step", [1, 2, 4])
def test_any_step_serves_any_number_of_vectors(vectors, step):
    layout = Layout.parse("T D | int8/bytes/signed")
    problem, kernel = gemv(layout, 96, vectors, "integer", rows=step)
    operands = make_operands(problem, 97)
    agree(problem, operands, "integer", kernel(operands.x, kernel.pack("k", operands.k)))


@pytest.mark.parametrize(("splits", "threads"), [(1, 1), (2, 2), (3, 2), (7, 2)])
def test_splits_cover_each_row_once(splits, threads):
    layout = Layout.parse("T/16 D/4 t16 d4 | int8/bytes/signed")
    problem, kernel = gemv(layout, 64, 3, "integer", splits=splits, threads=threads)
    operands = make_operands(problem, 129)
    matrix = kernel.pack("k", operands.k)
    out = np.full((1, 3, 129), np.nan, np.float32)
    bound = kernel.bind(operands.x, matrix, out=out)
    assert bound() is out
    agree(problem, operands, "integer", out)
    first = out.copy()
    out[...] = np.nan
    bound()
    np.testing.assert_array_equal(out, first)


def test_many_vectors_are_prepared_by_several_threads():
    layout = Layout.parse("T/16 D/4 t16 d4 | int8/bytes/signed")
    problem, kernel = gemv(layout, 2048, 16, "integer", threads=2)
    assert kernel._preparing_threads == 2
    operands = make_operands(problem, 33)
    agree(problem, operands, "integer", kernel(operands.x, kernel.pack("k", operands.k)))


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-10, 1e10, 1e30])
def test_activations_of_any_magnitude_are_rounded_alike(scale):
    """y is linear in x: what a power-of-two factor changes is the exponent."""
    factor = 2.0 ** np.round(np.log2(scale))
    layout = Layout.parse("T/16 D/4 t16 d4 | int8/bytes/signed")
    problem, kernel = gemv(layout, 64, 1, "integer")
    operands = make_operands(problem, 32)
    matrix = kernel.pack("k", operands.k)
    usual = kernel(operands.x, matrix).astype(np.float64)
    scaled = kernel((operands.x * factor).astype(np.float32), matrix).astype(np.float64) / factor
    np.testing.assert_allclose(scaled, usual, rtol=1e-2 if scale < 1e-37 else 1e-5, atol=np.abs(usual).max() * 1e-5)


def test_groups_of_zeros_and_zeros_only():
    layout = Layout.parse("T/16 D/4 t16 d4 | int8/bytes/offset")
    problem, kernel = gemv(layout, 96, 2, "integer")
    operands = make_operands(problem, 33)
    matrix = kernel.pack("k", operands.k)
    x = operands.x.copy()
    x[:, :, 32:64] = 0
    expected = x[0].astype(np.float64) @ operands.k.dequantize()[0].T
    np.testing.assert_allclose(kernel(x, matrix)[0], expected, atol=0.02 * np.abs(expected).max())
    np.testing.assert_array_equal(kernel(np.zeros_like(x), matrix), 0)


def test_denormal_and_single_activations():
    layout = Layout.parse("T D | int8/bytes/signed")
    problem, kernel = gemv(layout, 40, 1, "integer")
    operands = make_operands(problem, 31)
    matrix = kernel.pack("k", operands.k)
    x = np.zeros_like(operands.x)
    x[0, 0, 39] = 3.0
    expected = 3.0 * operands.k.dequantize()[0, :, 39]
    np.testing.assert_allclose(kernel(x, matrix)[0, 0], expected, rtol=1e-6)
    x[0, 0, :32] = 1e-42  # a group of denormals beside it
    np.testing.assert_allclose(kernel(x, matrix)[0, 0], expected, rtol=1e-6)


def test_preparation_in_vector_code_follows_the_tables():
    """Codes, sums and scales against the tables read one slot at a time."""
    import ctypes

    from lowbit.kernels.cpu.compiled import named

    isa, tried = detect(), 0
    for name, columns in itertools.product(
        (
            "T/16 D/8 t16 d8 | int4/contiguous_permuted/offset",
            "T D | int8/bytes/offset",
            "T D | int4/contiguous_permuted/signed",
        ),
        (8, 64, 136),
    ):
        spec = TileSpec("k", Layout.parse(name), columns, isa, "integer", 1, 2, 0)
        try:
            tables = preparation(spec)
        except LayoutError:
            continue
        tried += 1
        assert sum(part.trips * part.channels for part in stretches(spec, tables)) == columns
        rng = np.random.default_rng(columns)
        x = rng.standard_normal((2, columns)).astype(np.float32)
        slots = np.full((2, len(tables.order)), 99, np.int8)
        aux = np.full((2, 2, len(tables.aux_group)), 99, np.int32)
        addresses = [array.ctypes.data for array in (x, slots, aux)]
        job = np.array([*addresses, *(array.strides[0] for array in (x, slots, aux))], np.int64)
        at = named(prepare_symbol(spec, tables), isa, functools.partial(prepare_text, spec, tables))
        prepare = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(at)
        for row in range(2):
            prepare(job.ctypes.data, row)
            padded = np.zeros(-(-columns // 32) * 32)
            padded[:columns] = x[row]
            scale = np.abs(padded.reshape(-1, 32)).max(axis=1) / 127
            codes = np.floor(padded.reshape(-1, 32) / scale[:, None] + 0.5).astype(np.int64)
            flat = np.append(codes.reshape(-1)[:columns], 0)
            assert (
                slots[row] == flat[np.minimum(tables.order, columns)]
            ).mean() > 0.98  # but for values on a threshold
            sums = np.array([slots[row][(tables.order // 32 == g) & (tables.order < columns)].sum() for g in range(9)])
            if tables.offset:
                expected = -tables.offset * sums[tables.aux_group] * tables.aux_first
                np.testing.assert_array_equal(aux[row, 0], expected)
            np.testing.assert_allclose(aux[row, 1].view(np.float32), scale[tables.aux_group], rtol=1e-6)
    assert tried >= 3


def test_floats_in_channel_order_are_read_where_they_lie():
    spec = TileSpec("k", Layout.parse("T D | fp16"), 64, detect(), "float", 1, 2, 0)
    tables = preparation(spec)
    assert in_place(spec, tables) == (tables.order.tolist() == list(range(64)))


def test_bad_operands_are_refused():
    layout = Layout.parse("T D | int8/bytes/signed")
    problem, kernel = gemv(layout, 64, 2, "integer")
    operands = make_operands(problem, 40)
    matrix = kernel.pack("k", operands.k)
    with pytest.raises(ProblemError, match="2 operands"):
        kernel(operands.x)
    with pytest.raises(ProblemError, match=r"x must have shape \(1, 2, 64\)"):
        kernel(operands.x[:, :1], matrix)
    with pytest.raises(ProblemError, match="65 rows"):
        kernel(operands.x, matrix, tokens=65)
    with pytest.raises(ProblemError, match="out must be"):
        kernel(operands.x, matrix, out=np.zeros((2, 40), np.float32))
    with pytest.raises(LayoutError, match="PackedTensor"):
        kernel(operands.x, operands.k)
    with pytest.raises(LayoutError, match="is packed as"):
        kernel(operands.x, pack(operands.k, Layout.parse("T/16 D t16 | int8/bytes/signed")))
    x = operands.x.copy()
    x[0, 1, 5] = np.nan
    with pytest.raises(QuantizationError, match=r"x\[vector 1, column 5\] = nan"):
        kernel(x, matrix)
