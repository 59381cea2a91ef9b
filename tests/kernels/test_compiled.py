"""Compiled kernels across processes, and what of them may be kept at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lowbit.kernels import packing
from lowbit.kernels.cpu import code_files, machine
from lowbit.kernels.cpu.compiled import _facts
from lowbit.kernels.cpu.isa import detect
from lowbit.kernels.cpu.spec import TileSpec
from lowbit.kernels.errors import CompileError
from lowbit.kernels.layout import Layout


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(code_files.CACHE_VARIABLE, str(tmp_path))
    return tmp_path


KERNELS = textwrap.dedent(
    """
    import json, sys
    import numpy as np
    from lowbit.kernels.cpu import objects
    from lowbit.kernels.cpu.backend import CpuBackend
    from lowbit.kernels.problem import Problem
    from lowbit.kernels.reference import make_operands

    backend, sums = CpuBackend(), {}
    for key in ("attend h4/2 d40 q2 w8a8", "attend h4/2 d40 q2 w8a8+w4a8 softcap 30", "qk h2/2 d64 q1 fp16",
                "sv h2/2 d64 q1 w4a8", "gemv k64 c2 w4a8"):
        problem = Problem.parse(key)
        operands = make_operands(problem, 70, 1)
        kernel = backend.compile(problem, backend.baseline(problem, 2))
        packed = [kernel.pack(role, getattr(operands, role)) for role in problem.roles]
        sums[key] = kernel(operands.x, *packed).tobytes().hex()
    print(json.dumps([objects.counts.built, objects.counts.loaded, "numba" in sys.modules, sums]))
    """
)


def in_a_process(script: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=True,
    )
    return json.loads(done.stdout)


def test_every_operator_is_loaded_by_a_second_process_without_compiling(place: Path) -> None:
    built, loaded, numba, first = in_a_process(KERNELS)
    assert built > 10 and loaded == 0 and numba
    built_again, loaded_again, numba_again, second = in_a_process(KERNELS)
    assert (built_again, loaded_again, numba_again) == (0, built, False)
    assert second == first
    uncached = in_a_process(KERNELS, LOWBIT_CACHE="off")
    assert uncached == [built, 0, True, first]


def test_another_instruction_set_is_another_object(place: Path) -> None:
    built, _, _, _ = in_a_process(KERNELS)
    if detect().name == "generic":
        pytest.skip("there is no smaller machine than this one")
    built_for_another, _, _, _ = in_a_process(KERNELS, LOWBIT_ISA="generic")
    assert built_for_another == built - 1  # the pool's code is for any


def test_code_that_needs_the_interpreter_is_refused() -> None:
    import numba
    import numpy as np
    from numba import types

    @numba.cfunc(types.void(types.intp, types.int64), nopython=True)
    def raises(job: int, index: int) -> None:
        np.empty(index).fill(job)

    native = raises.native_name.removeprefix("cfunc.")
    with pytest.raises(CompileError, match="which only the interpreter has"):
        machine.task_object_code(raises.inspect_llvm(), native, "f", detect())


def test_a_packing_from_outside_is_known_by_its_code(registry: dict[str, packing.Packing]) -> None:
    """Where its unpacking comes from a module that the sources' digest leaves out."""
    layout = Layout.parse("T D | int8/bytes/signed")
    plain = layout.packing
    spec = TileSpec("k", layout, 64, detect(), "integer", 1, 1, 0)

    def lower(block: Any, word: Any) -> list[Any]:
        return [word]

    theirs = replace(spec, layout=layout.with_packing(replace(plain, arrangement="theirs", lower=lower)))
    facts = [_facts(each, lambda text=text: text) for each in (spec, theirs) for text in ("one", "other")]
    assert facts[0] == facts[1] and facts[2] != facts[3]
