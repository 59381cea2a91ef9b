"""Minima of unsigned codes against float64, on every instruction set of this machine."""

import numpy as np
import pytest
from lowbit.kernels import gemv_fields as fields
from lowbit.kernels.cpu.backend import prepare_address, tile_address
from lowbit.kernels.cpu.compiled import operator
from lowbit.kernels.cpu.isa import ISAS, runs_here
from lowbit.kernels.cpu.keys import preparation
from lowbit.kernels.cpu.minima import MinimaSpec
from lowbit.kernels.cpu.pool import run
from lowbit.kernels.cpu.spec import TileSpec
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import OPERAND_FIELDS, aligned_zeros, pack
from lowbit.kernels.quantize import Quantized

ISAS_HERE = [isa for isa in ISAS.values() if runs_here(isa)]
LAYOUT = Layout.parse("T/16 D/4 t16 d4 | int4/planes/offset")


@pytest.mark.parametrize("isa", ISAS_HERE, ids=lambda isa: isa.name)
@pytest.mark.parametrize("vectors, step, minima_step", [(1, 1, 1), (8, 4, 2), (10, 4, 4), (16, 8, 2)])
@pytest.mark.parametrize("rows, columns", [(96, 64), (45, 96), (576, 80)])
def test_products_with_minima(isa, vectors, step, minima_step, rows, columns):
    rng = np.random.default_rng(rows + vectors)
    groups = -(-columns // 32)
    codes = rng.integers(-8, 8, (1, rows, columns)).astype(np.int8)
    scales = rng.uniform(0.01, 0.2, (1, rows, groups)).astype(np.float16)
    minima = rng.uniform(-2.0, 1.0, (rows, groups)).astype(np.float16)
    x = rng.standard_normal((vectors, columns)).astype(np.float32)
    packed = pack(Quantized("int4", codes, scales), LAYOUT)
    # Minima lie as scales do.
    as_scales = pack(Quantized("int4", codes, minima[None]), LAYOUT).scales
    spec = TileSpec("k", LAYOUT, columns, isa, "float", step, 1, 0).canonical
    tables = preparation(spec)
    sums = np.zeros((vectors, groups), np.float32)
    for g in range(groups):
        sums[:, g] = x[:, 32 * g : 32 * g + 32].sum(axis=1)
    prepared = aligned_zeros(vectors * 4 * len(tables.order), np.uint8)
    aux = aligned_zeros(vectors * 8 * len(tables.aux_group) + 64, np.uint8)
    scratch = aligned_zeros(4 * step * 32, np.uint8)
    out = np.zeros((vectors, rows), np.float32)
    job = np.zeros(len(fields.FIELDS), np.int64)
    job[fields.X], job[fields.PREPARED], job[fields.AUX] = x.ctypes.data, prepared.ctypes.data, aux.ctypes.data
    job[fields.X_BYTES], job[fields.PREPARED_BYTES] = 4 * columns, 4 * len(tables.order)
    job[fields.AUX_BYTES] = 8 * len(tables.aux_group)
    job[fields.OUT], job[fields.ROWS], job[fields.VECTORS], job[fields.STEP] = out.ctypes.data, rows, vectors, step
    job[fields.BLOCK], job[fields.SPLITS], job[fields.SCRATCH] = 64, 3, scratch.ctypes.data
    job[fields.MINIMA], job[fields.GROUPS], job[fields.SUMS] = as_scales.ctypes.data, groups, sums.ctypes.data
    job[fields.ADD_MINIMA] = tile_address(MinimaSpec(isa, minima_step))
    job[fields.MINIMA_STEP] = minima_step
    job[fields.MATRIX : fields.MATRIX + OPERAND_FIELDS] = (*packed.addresses, tile_address(spec))
    run(prepare_address(spec), job.ctypes.data, vectors, 1)
    run(operator("gemv", isa), job.ctypes.data, 3, 1)
    weights = (codes[0] + 8.0) * np.repeat(scales[0].astype(np.float64), 32, axis=1)[:, :columns]
    weights += np.repeat(minima.astype(np.float64), 32, axis=1)[:, :columns]
    expected = x.astype(np.float64) @ weights.T
    scale = np.abs(x).astype(np.float64) @ np.abs(weights).T
    assert (np.abs(out - expected) <= 2e-6 * scale + 1e-6).all()
