"""Contestants with known answers; workers make them as ``fake_contestant:Right`` and so on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
from lowbit.autotune.bench.case import Case, Part
from lowbit.autotune.bench.contestant import Absent, Contestant, Entry, Unsupported
from lowbit.autotune.bench.inputs import small_operand, truth, values

CALL_S = 0.003


class Right(Contestant):
    """Stores float64 and answers with the truth, times ``factor``."""

    factor = 1.0

    def open(self, threads: int) -> str:
        return f"1.0 on {threads}"

    def enter(self, case: Case, candidate: str) -> Iterator[Entry]:
        yield self.entry(case, self.factor, CALL_S, "float64")

    @staticmethod
    def entry(case: Case, factor: float, call_s: float, storage: str) -> Entry:
        held = {role: [values(case, role, part) for part in case.parts()] for role in case.problem.roles}
        order = list(case.parts())

        def stored(role: str, part: Part) -> np.ndarray:
            return held[role][order.index(part)].astype(np.float64)

        answer = truth(case, small_operand(case), stored) * factor
        regions = tuple((each.ctypes.data, each.nbytes) for parts in held.values() for each in parts)
        return Entry(lambda: time.sleep(call_s), lambda: None, regions, storage, lambda: answer, stored, held)


class Wrong(Right):
    factor = 1.1


class Choosy(Right):
    """Three ways: a wrong one, a slow one and a fast one."""

    def enter(self, case: Case, candidate: str) -> Iterator[Entry]:
        yield self.entry(case, 1.1, CALL_S / 4, "wrong")
        yield self.entry(case, 1.0, 4 * CALL_S, "slow")
        yield self.entry(case, 1.0, CALL_S, "fast")


class Missing(Contestant):
    def open(self, threads: int) -> str:
        raise Absent("not installed:\npip install it")

    def enter(self, case: Case, candidate: str) -> Iterator[Entry]:
        raise AssertionError("nobody asks one that is absent")


class Picky(Right):
    def enter(self, case: Case, candidate: str) -> Iterator[Entry]:
        raise Unsupported("no such operator")


class Dying(Right):
    """Dies in its first case at even context lengths; says something before it does."""

    def enter(self, case: Case, candidate: str) -> Iterator[Entry]:
        if case.tokens % 2 == 0:
            os.write(2, b"error: bad block\nframe 1\n")
            os.kill(os.getpid(), signal.SIGABRT)
        yield from super().enter(case, candidate)


class NotANumber(Right):
    factor = float("nan")
