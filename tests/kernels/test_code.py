"""Generated code: what the hot loops unpack with, instruction by instruction.

``LOWBIT_GOLDEN=write pytest tests/kernels/test_code.py`` rewrites golden/*.txt from what is generated; look at the
difference before committing it. Only vector instructions that mask, shift, permute, multiply or convert are compared,
by mnemonic and number: registers, loads, addresses and order differ from one LLVM to the next.
"""

import os
import re
from pathlib import Path

import pytest
from golden_file import sections
from hot_loop import hot_loop, spills, unpacking
from kernel_check import candidate, problem
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.cpu.isa import ISAS
from lowbit.kernels.cpu.space import tile_specs

GOLDEN = Path(__file__).parent / "golden"
ISA_NAMES = ("avx512_vnni", "avx2", "neon_dot")
TILES = (
    ("w8a8", "T/16 D/4 t16 d4 | int8/bytes/offset", "integer"),
    ("w8a8", "T D | int8/bytes/signed", "integer"),
    ("w8a8", "T D | int8/bytes/signed", "float"),
    ("w4a8", "T D | int4/contiguous/offset", "integer"),
    ("w4a8", "T D | int4/contiguous_permuted/signed", "integer"),
    ("w4a8", "T/16 D/8 t16 d8 | int4/lane_interleaved/offset", "integer"),
    ("w4a8", "T D | int4/planes/offset", "integer"),
    ("w4a8", "T D | int4/planes/offset", "float"),
    ("fp16", "T D | fp16", "float"),
)


def code(operator, precision, layout, pipeline, isa, **schedule):
    p = problem(f"{operator} h1/1 d256 q1 {precision}")
    chosen = candidate(p, layout, pipeline=pipeline, **schedule)
    (only,) = CpuBackend(isa).code(p, chosen)
    (spec,) = tile_specs(p, chosen, ISAS[isa])
    return only, spec


@pytest.mark.parametrize("isa", ISA_NAMES)
def test_unpacking_is_what_it_was(isa):
    path = GOLDEN / f"{isa}.txt"
    generated = {
        f"{pipeline} {layout}": unpacking(code("qk", precision, layout, pipeline, isa)[0].assembly)
        for precision, layout, pipeline in TILES
    }
    if os.environ.get("LOWBIT_GOLDEN") == "write":
        lines = ["# Vector instructions of the hot loop of qk, head_dim 256, one row. See test_code.py."]
        for name, counts in generated.items():
            lines += ["", f"[{name}]", *(f"{counts[m]} {m}" for m in sorted(counts))]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    stored = sections(path.read_text(encoding="utf-8"))
    assert set(stored) == set(generated)
    for name, counts in generated.items():
        assert counts == stored[name], name


@pytest.mark.parametrize(
    ("layout", "shuffles"),
    [
        ("T D | int4/planes/offset", 0),
        ("T D | int4/contiguous_permuted/offset", 0),
        ("T/16 D/8 t16 d8 | int4/lane_interleaved/offset", 0),
        ("T D | int4/contiguous/offset", 2),
    ],
)
def test_a_register_of_nibbles_costs_a_shift_and_two_masks(layout, shuffles):
    """And two shuffles where layout order is restored. Offset codes are multiplied as they are: no exclusive-or."""
    only, spec = code("qk", "w4a8", layout, "integer", "avx2")
    loads = len(spec.plan.main.chunks)
    counts = unpacking(only.assembly)
    assert counts["vpsrlw"] == loads
    assert counts["vpand"] + counts["vandps"] == 2 * loads
    assert sum(counts[m] for m in counts if m.startswith("vpunpck")) == shuffles * loads
    assert counts["vpmaddubsw"] == 2 * loads
    assert not any(m.startswith("vpxor") for m in counts)


@pytest.mark.parametrize("isa", ISA_NAMES)
def test_hot_loops_keep_their_accumulators_in_registers(isa):
    """The tile that suits four-way dots, for one row and for four; and its mirror image for values."""
    for operator, order, rows in (
        ("qk", "T/16 D/4 t16 d4", 1),
        ("qk", "T/16 D/4 t16 d4", 4),
        ("sv", "T/32 D/16 t32/4 d16 t4", 1),
    ):
        only, _ = code(operator, "w8a8", f"{order} | int8/bytes/offset", "integer", isa, rows=rows, registers=1)
        assert len(hot_loop(only.assembly)) > 10
        assert spills(only.assembly) == []


def test_values_per_iteration_is_what_the_loop_loads():
    """Bytes of packed words that the hot loop loads, in codes."""
    for precision, bits in (("w8a8", 8), ("w4a8", 4)):
        layout = f"T D | {'int8/bytes' if bits == 8 else 'int4/planes'}/offset"
        only, spec = code("qk", precision, layout, "integer", "avx2")
        chunks = spec.plan.main.chunks
        assert only.values_per_iteration == len(chunks) * 32 * 8 // bits
        assert (only.role, only.rows, only.packing) == ("k", 1, spec.layout.packing.name)
        assert only.symbol in only.assembly
        assert re.search(rf'define .*@"?{only.symbol}"?\(', only.ir)


def test_prefetch_is_emitted_only_where_it_is_asked_for():
    for prefetch, expected in ((0, 0), (8, 1)):
        only, _ = code("qk", "w8a8", "T/16 D/4 t16 d4 | int8/bytes/offset", "integer", "avx2", prefetch=prefetch)
        found = {operands for mnemonic, operands in hot_loop(only.assembly) if mnemonic.startswith("prefetch")}
        assert min(len(found), 1) == expected


def test_code_is_the_same_every_time():
    first, _ = code("sv", "w4a8", "T/32 D t32 | int4/planes/signed", "integer", "avx2")
    from lowbit.kernels.cpu import backend

    backend._code.cache_clear()
    again, _ = code("sv", "w4a8", "T/32 D t32 | int4/planes/signed", "integer", "avx2")
    assert first == again
