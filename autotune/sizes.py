"""Sizes of memory as people write them, decimal and binary."""

from __future__ import annotations

import re

import click

UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
_BY_NAME = {name.lower(): size for name, size in UNITS.items()}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def size_in_bytes(text: str) -> int:
    """Bytes that ``24GB`` (decimal), ``24GiB`` (binary), ``512 MiB`` or ``1000000`` (bytes) mean, in any case.

    Raises
    ------
    ValueError
        For anything else, and for less than a byte.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _BY_NAME.get((match[2] or "B").lower()) if match else None
    if match is None or unit is None or (found := int(float(match[1]) * unit)) < 1:
        raise ValueError(f"{text!r} is no size: write 24GB (decimal), 24GiB (binary) or 512MiB")
    return found


class Size(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """An option's value that is a size."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return size_in_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
