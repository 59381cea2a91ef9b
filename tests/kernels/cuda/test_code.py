"""Generated GPU code: what kernels load, unpack and contract with, instruction by instruction.

``LOWBIT_GOLDEN=write pytest tests/kernels/cuda/test_code.py`` rewrites golden/ptx.txt from what is generated; look at
the difference before committing it. Only instructions that steps emit themselves are compared, by mnemonic and number:
registers, addresses, order and what a compiler makes of loops differ from one NVVM to the next.
"""

import os
import re
from collections import Counter
from pathlib import Path

import pytest
from golden_file import sections
from kernel_check import problem
from lowbit.kernels.candidate import Candidate, Launch
from lowbit.kernels.cuda import program, ptx
from lowbit.kernels.layout import Layout

pytest.importorskip("numba_cuda")

GOLDEN = Path(__file__).parent.parent / "golden" / "ptx.txt"
EMITTED = re.compile(r"\b(dp4a\.\w+\.\w+|lop3\.b32|prmt\.b32|ld\.global\.nc[\w:.]*\.v[24]\.b32|cp\.async\.cg[\w.]*)")
KERNELS = (
    ("w8a8", "T/32 D/16 t32 d16", "T/4 D t4", "int8/bytes/signed", "integer", 0),
    ("w8a8", "T D", "T D", "int8/bytes/signed", "integer", 0),
    ("w8a8", "T D", "T/16 D t16", "int8/bytes/offset", "integer", 2),
    ("w4a8", "T/32 D/32 t32 d32", "T/8 D t8", "int4/contiguous/offset", "integer", 0),
    ("w4a8", "T/32 D/32 t32 d32", "T/8 D t8", "int4/contiguous_permuted/offset", "integer", 0),
    ("w4a8", "T/32 D/32 t32 d32", "T/8 D t8", "int4/lane_interleaved/offset", "raw", 0),
    ("w4a8", "T D", "T/32 D t32", "int4/planes/signed", "integer", 0),
    ("w4a8", "T D", "T D", "int4/contiguous/offset", "float", 0),
    ("fp16", "T/32 D/8 t32 d8", "T D", "fp16", "float", 0),
)


def emitted(precision, k, v, packing, pipeline, stages):
    """Counter of mnemonics in the main kernel's PTX."""
    candidate = Candidate(
        Layout.parse(f"{k} | {packing}"),
        Layout.parse(f"{v} | {packing}"),
        pipeline,
        Launch(rows=2, lanes=1, loads=4, stages=stages, splits=1, warps=2),
    )
    built = program.build(problem(f"attend h2/1 d64 q1 {precision}"), candidate, "sm_86")
    return Counter(EMITTED.findall(ptx.compile_entry(built.main, "sm_86")))


def test_kernels_emit_what_they_did():
    generated = {
        f"{pipeline}, stages {stages}: K {k} V {v}, {packing}": emitted(precision, k, v, packing, pipeline, stages)
        for precision, k, v, packing, pipeline, stages in KERNELS
    }
    if os.environ.get("LOWBIT_GOLDEN") == "write":
        lines = ["# Mnemonics that the steps of attend h2/1 d64 emit for sm_86; see test_code.py"]
        for name, counts in generated.items():
            lines += ["", f"[{name}]", *(f"{count} {mnemonic}" for mnemonic, count in sorted(counts.items()))]
        GOLDEN.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert generated == sections(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "kernel", [each for each in KERNELS if each[4] != "float"], ids=lambda each: f"{each[3]} {each[4]}"
)
def test_dots_are_as_many_as_codes_and_rows_make(kernel):
    """64 channels × 32 tokens of keys and of values are 128 codes a lane; a dot takes four, for each of two rows."""
    counts = emitted(*kernel)
    dots = sum(count for name, count in counts.items() if name.startswith("dp4a"))
    tile = 2 * 64 * 32 // 32 // 4 * 2
    if kernel[4] == "raw":
        tile = tile * 3 // 2
    # Sums of a word of weights, where codes have an offset: one for each four (row, group) pairs.
    assert tile <= dots <= tile + 4
