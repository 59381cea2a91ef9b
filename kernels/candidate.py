"""A candidate: layouts and a schedule, everything a search chooses between."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Self

from .errors import LayoutError
from .layout import Layout

PIPELINES = ("integer", "float")
"""``integer``: the contraction stays in integers and scales are applied outside the hot loop. ``float``: codes are
dequantised to float32 in the hot loop."""

BFLOAT = "bfloat"
"""A pipeline for many rows where a matrix unit multiplies floats of 16 bits: keys are contracted in integers, values
under weights of 8 significant bits. Codes of 8 bits are exact in such floats."""

_SCHEDULE = re.compile(
    r"rows (\d{1,18}), registers (\d{1,18}), block (\d{1,18}), "
    r"splits (\d{1,18}), prefetch (\d{1,18}), threads (\d{1,18})"
)

SCHEDULE_BOUNDS = {
    "rows": (1, 64),
    "registers": (1, 64),
    "block": (32, 1 << 20),
    "splits": (1, 1 << 16),
    "prefetch": (0, 4096),
    "threads": (1, 256),
}
"""Least and most of each count of a schedule."""


@dataclass(frozen=True)
class Schedule:
    """What a kernel can choose besides the layout.

    Parameters
    ----------
    rows : int
        Rows of the small operand (query heads × positions) handled in one pass over the packed operand.
    registers : int
        Vector registers of outputs held per row in the hot loop ("tiles per iteration").
    block : int
        Tokens processed between two softmax updates, a multiple of 32.
    splits : int
        Contiguous token ranges decoded in parallel and merged; 1 runs each key/value head as one task.
    prefetch : int
        Cache lines that the hot loop prefetches ahead; 0 leaves it to the hardware.
    threads : int
        Threads that share the tasks (key/value heads × splits); 1 runs them all inline, with no fork.

    Raises
    ------
    LayoutError
        For a count outside `SCHEDULE_BOUNDS`, or a block that is no multiple of 32.
    """

    rows: int
    registers: int
    block: int
    splits: int
    prefetch: int
    threads: int

    def __post_init__(self) -> None:
        for name, (least, most) in SCHEDULE_BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise LayoutError(f"a schedule's {name} must be {least} to {most}, not {getattr(self, name)}")
        if self.block % 32:
            raise LayoutError(f"a schedule's block must be a multiple of 32 tokens, not {self.block}")

    @property
    def name(self) -> str:
        return (
            f"rows {self.rows}, registers {self.registers}, block {self.block}, "
            f"splits {self.splits}, prefetch {self.prefetch}, threads {self.threads}"
        )

    @classmethod
    def parse(cls, name: str) -> Self:
        match = _SCHEDULE.fullmatch(name)
        if match is None:
            raise LayoutError(f"not a schedule's name: {name!r}")
        return cls(*map(int, match.groups()))

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Candidate:
    """Layouts of the packed operands, the pipeline and the schedule.

    Parameters
    ----------
    k, v : Layout or None
        Layout of the keys (``qk``, ``attend``) and of the values (``sv``, ``attend``).
    pipeline : str
        One of `PIPELINES`, or `BFLOAT`.
    schedule : Schedule
    """

    k: Layout | None
    v: Layout | None
    pipeline: str
    schedule: Schedule

    @property
    def layout(self) -> str:
        """Name of the layouts alone, for instance ``K: T D | int8/bytes/signed; V: …``."""
        parts = [f"{role}: {layout.name}" for role, layout in (("K", self.k), ("V", self.v)) if layout is not None]
        return "; ".join(parts)

    @property
    def name(self) -> str:
        """The stored name: layouts, pipeline and schedule. Equal candidates have equal names."""
        return f"{self.layout}; {self.pipeline}; {self.schedule.name}"

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, name: str) -> Self:
        """Inverse of `name`.

        Raises
        ------
        LayoutError
            If ``name`` is malformed.
        """
        parts = name.split("; ")
        if len(parts) < 3:
            raise LayoutError(f"not a candidate's name: {name!r}")
        *roles, pipeline, schedule = parts
        layouts: dict[str, Layout | None] = {"K": None, "V": None}
        for part in roles:
            role, _, layout = part.partition(": ")
            if role not in layouts or layouts[role] is not None:
                raise LayoutError(f"not a candidate's name: {name!r}")
            layouts[role] = Layout.parse(layout)
        if pipeline not in (*PIPELINES, BFLOAT):
            raise LayoutError(f"unknown pipeline {pipeline!r} in {name!r}")
        return cls(layouts["K"], layouts["V"], pipeline, Schedule.parse(schedule))
