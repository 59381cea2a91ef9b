"""What `work` says of a launch against what a simulated launch does."""

from collections import Counter

import numpy as np
import pytest
from lowbit.kernels.candidate import Candidate, Launch
from lowbit.kernels.cuda import memory, simulator
from lowbit.kernels.cuda.backend import CudaBackend
from lowbit.kernels.cuda.marks import K_STEP, TILE
from lowbit.kernels.cuda.python_ops import PythonOps
from lowbit.kernels.cuda.work import work
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack
from lowbit.kernels.problem import Problem
from lowbit.kernels.reference import make_operands

CASES = {
    "attend": ("w8a8", "T/32 D/16 t32 d16", "T/4 D t4", "int8/bytes/offset", Launch(3, 1, 4, 0, 2, 2)),
    "lanes": ("w8a8", "T D", "T D", "int8/bytes/signed", Launch(2, 4, 4, 0, 1, 2)),
    "nibbles": ("w4a8", "T/32 D/32 t32 d32", "T/8 D t8", "int4/lane_interleaved/offset", Launch(3, 1, 1, 0, 3, 1)),
    "staged": ("w4a8", "T D", "T/32 D t32", "int4/contiguous_permuted/offset", Launch(3, 1, 4, 2, 2, 2)),
    "floats": ("fp16", "T/32 D/8 t32 d8", "T D", "fp16", Launch(3, 1, 2, 0, 2, 1)),
}


class Observed:
    """Accesses of all threads to each operand's memory, by size."""

    def __init__(self, monkeypatch, regions):
        self.loads = Counter()
        self.marks = Counter()
        self._regions = regions
        self._patch(monkeypatch, "load_words", lambda count: 4 * count)
        self._patch(monkeypatch, "load_f16", lambda: 2)

        def mark(ops, number):
            self.marks[number] += simulator.thread().lane == 0

        monkeypatch.setattr(PythonOps, "mark", mark)

    def _patch(self, monkeypatch, name, size):
        plain = getattr(memory, name)

        def counted(address, *given):
            for region, (first, nbytes) in self._regions.items():
                if first <= address < first + nbytes:
                    self.loads[region, size(*given)] += 1
            return plain(address, *given)

        monkeypatch.setattr(memory, name, counted)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", [33, 160])
def test_loops_and_loads_are_as_many_as_simulated_threads_execute(case, tokens, monkeypatch):
    precision, k, v, packing, launch = CASES[case]
    p = Problem("attend", 10, 2, 80, precision)
    candidate = Candidate(
        Layout.parse(f"{k} | {packing}"),
        Layout.parse(f"{v} | {packing}"),
        "float" if precision == "fp16" else "integer",
        launch,
    )
    operands = make_operands(p, tokens)
    packed = {role: pack(getattr(operands, role), getattr(candidate, role)) for role in p.roles}
    regions = {role: (each.words.ctypes.data, each.words.nbytes) for role, each in packed.items()}
    regions |= {f"{role} scales": (each.scales.ctypes.data, each.scales.nbytes) for role, each in packed.items()}
    kernel = CudaBackend("sm_86").compile(p, candidate)
    import lowbit.kernels.cuda.program as program

    marked = program.build(p, candidate, "sm_86", marks=True)
    monkeypatch.setattr(kernel, "program", marked, raising=False)
    seen = Observed(monkeypatch, regions)
    kernel(operands.x, *packed.values())

    said = work(p, candidate, tokens, "sm_86")
    expected = Counter()
    for access in said.accesses:
        if access.space == "global":
            active = sum(address >= 0 for address in access.addresses)
            times = round(access.count * said.iterations[access.mark]) * active
            expected[access.name, access.width_bytes] += times
    found = Counter()
    for (region, size), count in seen.loads.items():
        found["scales" if region.endswith("scales") else region, size] += count
    assert found == expected
    passes = -(-p.rows // launch.rows)
    assert said.iterations[TILE] == 2 * passes * -(-tokens // 32)
    if K_STEP in said.iterations:
        assert said.iterations[K_STEP] % said.iterations[TILE] == 0
    assert np.isfinite([*said.iterations.values(), *said.longest.values()]).all()
