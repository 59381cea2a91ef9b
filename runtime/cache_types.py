"""Types of stored keys and values by the names that llama.cpp gives them, or by this project's formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..kernels.errors import ProblemError

FORMATS = {"f16": "fp16", "q8_0": "int8", "q4_0": "int4"}
"""Formats by llama.cpp's names; each has as many bits, in groups of 32 with one scale where it is quantised."""
PRECISIONS = {"fp16": "fp16", "int8": "w8a8", "int4": "w4a8"}
"""Precisions that store a format."""
_NAMES = {**{name: name for name in FORMATS}, **{each: name for name, each in FORMATS.items()}}


@dataclass(frozen=True)
class CacheTypes:
    """How a cache stores keys, and how values: ``f16``, ``q8_0`` or ``q4_0`` each."""

    k: str
    v: str

    @property
    def name(self) -> str:
        """``q8_0``, or ``q8_0+q4_0`` where keys and values differ."""
        return self.k if self.k == self.v else f"{self.k}+{self.v}"

    @property
    def precision(self) -> str:
        """Of the attention that reads such a cache: ``w8a8``, or ``w8a8+w4a8`` where keys and values differ."""
        return "+".join(dict.fromkeys(PRECISIONS[FORMATS[each]] for each in (self.k, self.v)))


REFERENCE = CacheTypes("f16", "f16")


def cache_type(name: str) -> str:
    """llama.cpp's name of a type.

    Raises
    ------
    ProblemError
        For an unknown name.
    """
    found = _NAMES.get(name.lower())
    if found is None:
        raise ProblemError(f"unknown cache type {name!r}: choose from {', '.join(_NAMES)}")
    return found


def cache_precision(name: str) -> str:
    """The precision that stores a type of this name.

    Raises
    ------
    ProblemError
        For an unknown name.
    """
    return PRECISIONS[FORMATS[cache_type(name)]]


def pairs(k: Sequence[str], v: Sequence[str]) -> tuple[CacheTypes, ...]:
    """The first type of keys with the first of values, and so on; a single type goes with all of the others.

    Raises
    ------
    ProblemError
        For unknown names, or lists of different lengths.
    """
    if len(k) != len(v) and 1 not in (len(k), len(v)):
        raise ProblemError(f"{len(k)} types of keys and {len(v)} of values: give as many, or one for all")
    count = max(len(k), len(v))
    keys, values = (each if len(each) == count else list(each) * count for each in (k, v))
    return tuple(
        dict.fromkeys(CacheTypes(cache_type(one), cache_type(other)) for one, other in zip(keys, values, strict=True))
    )
