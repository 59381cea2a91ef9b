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

RAW = "raw"
"""A pipeline for 4-bit codes on GPUs, integer but for its unpacking: whole bytes are contracted besides their low
nibbles, and high nibbles come from the difference. One mask unpacks eight codes, at the price of a third dot."""

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


_LAUNCH = re.compile(
    r"rows (\d{1,18}), lanes (\d{1,18}), loads (\d{1,18}), stages (\d{1,18}), splits (\d{1,18}), warps (\d{1,18})"
)

LAUNCH_BOUNDS = {
    "rows": (1, 16),
    "lanes": (1, 32),
    "loads": (1, 64),
    "stages": (0, 8),
    "splits": (1, 1 << 16),
    "warps": (1, 32),
}
"""Least and most of each count of a launch."""


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

    @property
    def code(self) -> tuple[int, ...]:
        """What of it is in the machine code; the rest are run-time values."""
        return self.rows, self.registers, self.prefetch

    @property
    def effort(self) -> tuple[int, int, int, int]:
        """Sorts schedules of equal predictions: fewest passes over the packed operands, then least machinery."""
        return -self.rows, self.registers, self.splits, self.prefetch

    @property
    def size(self) -> tuple[int, int]:
        """How much of the machine it occupies, to settle ties: threads, then splits."""
        return self.threads, self.splits

    @classmethod
    def parse(cls, name: str) -> Self:
        match = _SCHEDULE.fullmatch(name)
        if match is None:
            raise LayoutError(f"not a schedule's name: {name!r}")
        return cls(*map(int, match.groups()))

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Launch:
    """What a GPU kernel can choose besides the layout.

    Parameters
    ----------
    rows : int
        Rows of the small operand (query heads × positions) that one block serves; other blocks serve the others.
    lanes : int
        Lanes of a warp that share one token's dot product, a power of two; 1 gives each lane a token of its own.
    loads : int
        Vectors of the packed operand that a lane asks for before it uses the first.
    stages : int
        Tiles of 32 tokens that a warp has on their way into shared memory; 0 reads global memory straight.
    splits : int
        Token ranges, or ranges of a matrix's columns, that blocks of their own work on and that are merged.
    warps : int
        Warps of a block.

    Raises
    ------
    LayoutError
        For a count outside `LAUNCH_BOUNDS`, or lanes that are no power of two.
    """

    rows: int
    lanes: int
    loads: int
    stages: int
    splits: int
    warps: int

    def __post_init__(self) -> None:
        for name, (least, most) in LAUNCH_BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise LayoutError(f"a launch's {name} must be {least} to {most}, not {getattr(self, name)}")
        if self.lanes & (self.lanes - 1):
            raise LayoutError(f"a launch's lanes must be a power of two, not {self.lanes}")

    @property
    def name(self) -> str:
        return (
            f"rows {self.rows}, lanes {self.lanes}, loads {self.loads}, "
            f"stages {self.stages}, splits {self.splits}, warps {self.warps}"
        )

    @property
    def code(self) -> tuple[int, ...]:
        """What of it is in the machine code; the rest are run-time values."""
        return self.rows, self.lanes, self.loads, self.stages

    @property
    def effort(self) -> tuple[int, int, int, int]:
        """Sorts launches of equal predictions: fewest passes over the packed operands, then least machinery."""
        return -self.rows, self.stages, self.splits, self.loads

    @property
    def size(self) -> tuple[int, int]:
        """How much of the machine it occupies, to settle ties: splits, then warps."""
        return self.splits, self.warps

    @classmethod
    def parse(cls, name: str) -> Self:
        match = _LAUNCH.fullmatch(name)
        if match is None:
            raise LayoutError(f"not a launch's name: {name!r}")
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
        One of `PIPELINES`, or `BFLOAT` or `RAW`.
    plan : Schedule or Launch
        A CPU's or a GPU's.
    """

    k: Layout | None
    v: Layout | None
    pipeline: str
    plan: Schedule | Launch

    @property
    def schedule(self) -> Schedule:
        """The plan of a CPU's candidate.

        Raises
        ------
        LayoutError
            If it is a GPU's.
        """
        if not isinstance(self.plan, Schedule):
            raise LayoutError(f"a launch is no schedule: {self.plan.name!r}")
        return self.plan

    @property
    def launch(self) -> Launch:
        """The plan of a GPU's candidate.

        Raises
        ------
        LayoutError
            If it is a CPU's.
        """
        if not isinstance(self.plan, Launch):
            raise LayoutError(f"a schedule is no launch: {self.plan.name!r}")
        return self.plan

    @property
    def layout(self) -> str:
        """Name of the layouts alone, for instance ``K: T D | int8/bytes/signed; V: …``."""
        parts = [f"{role}: {layout.name}" for role, layout in (("K", self.k), ("V", self.v)) if layout is not None]
        return "; ".join(parts)

    @property
    def name(self) -> str:
        """The stored name: layouts, pipeline and schedule. Equal candidates have equal names."""
        return f"{self.layout}; {self.pipeline}; {self.plan.name}"

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
        if pipeline not in (*PIPELINES, BFLOAT, RAW):
            raise LayoutError(f"unknown pipeline {pipeline!r} in {name!r}")
        plan = Launch.parse(schedule) if "lanes" in schedule else Schedule.parse(schedule)
        return cls(layouts["K"], layouts["V"], pipeline, plan)
