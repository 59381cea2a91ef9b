"""The steps of a candidate's kernels, made once: everything that its layouts, packings and launch decide."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Problem
from .control import Control
from .key_steps import KeySteps
from .key_tile import KeyTile
from .online import Online
from .records import Records
from .shared import Shared
from .staging import Ring
from .value_steps import ValueSteps
from .value_tile import ValueTile


@dataclass(frozen=True)
class Steps:
    """Functions for the kernels of `lowbit.kernels.cuda.operators` and `lowbit.kernels.cuda.gemv`.

    Attributes
    ----------
    problem : Problem
    rows : int
        Rows of the small operand that a block serves.
    shared : Shared
    control : Control
    """

    problem: Problem
    rows: int
    shared: Shared
    control: Control
    _keys: KeySteps | None
    _values: ValueSteps | None

    @property
    def keys(self) -> KeySteps:
        assert self._keys is not None
        return self._keys

    @property
    def values(self) -> ValueSteps:
        assert self._values is not None
        return self._values

    def records(self) -> Records:
        return Records(self.values.values, self.problem.head_dim, self.problem.operator == "attend")

    def online(self) -> Online:
        return Online(self.rows, self.values.values.outputs, self.problem.softcap > 0)

    def ring(self) -> Ring:
        return Ring(self.shared, self.control)


def steps(
    problem: Problem,
    rows: int,
    keys: KeyTile | None,
    values: ValueTile | None,
    shared: Shared,
    marked: bool,
    streams: tuple[bool, bool],
) -> Steps:
    """Make them.

    Parameters
    ----------
    marked : bool
        Whether loops carry marks; see `lowbit.kernels.cuda.marks`.
    streams : pair of bool
        Whether keys, and values, pass the first cache by.
    """
    control = Control(marked)
    key_steps = None if keys is None else KeySteps(keys, problem.head_dim, shared, control, streams[0])
    value_steps = None if values is None else ValueSteps(values, keys, shared, streams[1])
    return Steps(problem, rows, shared, control, key_steps, value_steps)
