"""A packed matrix times vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .steps import Steps

GEMV = (
    ("k_words", "pointer"),
    ("k_scales", "pointer"),
    ("x", "pointer"),
    ("out", "pointer"),
    ("tokens", "int32"),
    ("rows", "int32"),
    ("factor", "float32"),
)


def build_gemv(steps: Steps) -> Callable[..., Any]:
    raise NotImplementedError
