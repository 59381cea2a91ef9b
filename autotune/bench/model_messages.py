"""What the comparison of whole models and its workers say to each other; all of it pickles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...runtime.cache_types import CacheTypes


@dataclass(frozen=True)
class ModelSetup:
    """The first message: which contestant to be, with which model. Answer: `lowbit.autotune.bench.messages.Opened`.

    ``database`` is only looked at by ``lowbit``; None where there is none. The thread that computes is pinned to
    ``cpu``.
    """

    contestant: str
    threads: int
    cpu: int
    search_path: tuple[str, ...]
    model: Path
    database: Path | None


@dataclass(frozen=True)
class Reach:
    """Fill a new cache up to ``depth`` tokens, with room for more. Answer: `Reached` or `Refused`."""

    types: CacheTypes
    depth: int
    room: int


@dataclass(frozen=True)
class Repeat:
    """Compute a prompt (``pp``) of so many tokens, or generate them one by one (``tg``), from the depth reached last.

    The first one of its kind at a depth is repeated once untimed before. Answer: `Taken`, one sample, or `Refused`.
    """

    test: str
    tokens: int


@dataclass(frozen=True)
class Check:
    """Compute a short text from an empty cache. Answer: `Checked` or `Refused`."""

    types: CacheTypes
    tokens: int


@dataclass(frozen=True)
class Weigh:
    """Answer: `Weighed`."""


@dataclass(frozen=True)
class Reached:
    """The cache is filled."""

    nbytes: int | None


@dataclass(frozen=True)
class Checked:
    """Logits (vocabulary,) after the last token, float32."""

    logits: NDArray[np.float32]


@dataclass(frozen=True)
class Weighed:
    """Resident bytes of the process: the most that it ever had, and what it had before it loaded the model.

    None where the system does not say.
    """

    peak_bytes: int | None
    before_bytes: int | None


ModelRequest = Reach | Repeat | Check | Weigh
