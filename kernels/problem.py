"""What is computed: an operator with its shape and precision."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

from .errors import ProblemError

OPERATORS = ("attend", "qk", "sv")
GROUP = 32
"""Channels that share one fp16 scale."""

MAX_QUERY_ROWS = 16
MOST_HEADS = 4096


@dataclass(frozen=True)
class Precision:
    """Storage format of the packed operand and of the small operand (activations).

    Parameters
    ----------
    name : str
        ``fp16``, ``w8a8`` or ``w4a8``.
    format : str
        Format of the stored codes: ``fp16``, ``int8`` or ``int4``.
    bits : int
        Bits a stored code takes.
    """

    name: str
    format: str
    bits: int


PRECISIONS = {
    p.name: p for p in (Precision("fp16", "fp16", 16), Precision("w8a8", "int8", 8), Precision("w4a8", "int4", 4))
}

_KEY = re.compile(
    r"(?P<operator>\w+) h(?P<heads>\d+)/(?P<kv_heads>\d+) d(?P<head_dim>\d+) q(?P<query_rows>\d+) (?P<precision>\w+)"
)


@dataclass(frozen=True)
class Problem:
    """One operator of a decode step, without its context length.

    Parameters
    ----------
    operator : str
        ``attend`` (fused decode attention), ``qk`` (scores) or ``sv`` (weighted sum of values).
    heads, kv_heads : int
        Query heads and key/value heads; ``kv_heads`` divides ``heads``.
    head_dim : int
        Channels of a head, a multiple of 8.
    precision : str
        A key of `PRECISIONS`.
    query_rows : int
        Query positions decoded at once, 1 to 16 (a speculative block).

    Raises
    ------
    ProblemError
        For any value outside these bounds.
    """

    operator: str
    heads: int
    kv_heads: int
    head_dim: int
    precision: str
    query_rows: int = 1

    def __post_init__(self) -> None:
        if self.operator not in OPERATORS:
            raise ProblemError(f"unknown operator {self.operator!r}: choose one of {', '.join(OPERATORS)}")
        if self.precision not in PRECISIONS:
            raise ProblemError(f"unknown precision {self.precision!r}: choose one of {', '.join(PRECISIONS)}")
        if self.heads < 1 or self.kv_heads < 1:
            raise ProblemError(f"heads and kv-heads must be at least 1, not {self.heads} and {self.kv_heads}")
        if self.heads > MOST_HEADS:
            raise ProblemError(f"heads must be at most {MOST_HEADS}, not {self.heads}")
        if self.heads % self.kv_heads:
            raise ProblemError(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly")
        if self.head_dim < 8 or self.head_dim % 8 or self.head_dim > 1024:
            raise ProblemError(f"head_dim must be a multiple of 8 from 8 to 1024, not {self.head_dim}")
        if not 1 <= self.query_rows <= MAX_QUERY_ROWS:
            raise ProblemError(f"query rows must be 1 to {MAX_QUERY_ROWS}, not {self.query_rows}")

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Rows of the small operand that meet one key/value head: query heads of the group × query positions."""
        return self.group * self.query_rows

    @property
    def storage(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def scale_groups(self) -> int:
        """Scales a token has in one head; the last group may be short. Zero for fp16."""
        return 0 if self.storage.format == "fp16" else -(-self.head_dim // GROUP)

    @property
    def key(self) -> str:
        """The name stored in databases, for instance ``attend h32/8 d128 q1 w8a8``."""
        return f"{self.operator} h{self.heads}/{self.kv_heads} d{self.head_dim} q{self.query_rows} {self.precision}"

    @classmethod
    def parse(cls, key: str) -> Self:
        """Inverse of `key`.

        Raises
        ------
        ProblemError
            If ``key`` is not such a name.
        """
        match = _KEY.fullmatch(key)
        if match is None:
            raise ProblemError(f"not a problem's name: {key!r}")
        fields = match.groupdict()
        return cls(
            operator=fields["operator"],
            heads=int(fields["heads"]),
            kv_heads=int(fields["kv_heads"]),
            head_dim=int(fields["head_dim"]),
            precision=fields["precision"],
            query_rows=int(fields["query_rows"]),
        )

    def with_operator(self, operator: str) -> Self:
        return replace(self, operator=operator)


def check_tokens(tokens: int) -> int:
    """Return ``tokens`` if it is a context length, else raise `ProblemError`."""
    if not 1 <= tokens <= 1 << 24:
        raise ProblemError(f"tokens must be 1 to {1 << 24}, not {tokens}")
    return tokens
