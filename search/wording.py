"""Errors of other people's code in one line, for reports."""

from __future__ import annotations

from collections.abc import Sequence


def one_line(error: BaseException, limit: int = 300) -> str:
    """The first line of an error's message, with its type in front."""
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
