"""What is computed: an operator with its shape and precision."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Self

from .errors import ProblemError

ROLES = {"attend": ("k", "v"), "qk": ("k",), "sv": ("v",), "gemv": ("k",)}
"""Packed operands of each operator. A matrix takes the keys' place: its rows are tokens, its columns channels."""

OPERATORS = tuple(ROLES)
USER = "user:"
"""Begins the operator of a kernel of somebody's own, ``user:cosine_scan``; see `lowbit.kernels.user`."""

GROUP = 32
"""Channels that share one fp16 scale."""

MAX_QUERY_ROWS = 16
MOST_TOKENS = 1 << 24
MOST_HEADS = 4096
MOST_COLUMNS = 1 << 17
LARGEST_SOFTCAP = 1e30


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

_USER_NAME = re.compile(r"user:\w+")
_USER_ROLES: dict[str, tuple[str, ...]] = {}


def declare_operator(operator: str, roles: tuple[str, ...]) -> None:
    """Say which packed operands the kernel behind ``user:name`` reads; a later declaration replaces an earlier one."""
    _USER_ROLES[operator] = roles


_KEY = re.compile(
    r"(?P<operator>(?:user:)?\w+) (?:h(?P<heads>\d+)/(?P<kv_heads>\d+) d(?P<head_dim>\d+) q|k(?P<columns>\d+) c)"
    r"(?P<rows>\d+) (?P<precision>[\w+]+)(?: window (?P<window>\d+))?(?: softcap (?P<softcap>[\d.e+-]+))?"
)


@dataclass(frozen=True)
class Problem:
    """One operator of a decode step, without its context length.

    Parameters
    ----------
    operator : str
        ``attend`` (fused decode attention), ``qk`` (scores), ``sv`` (weighted sum of values) or ``gemv`` (a matrix
        times 1 to 16 vectors), or ``user:name`` for a kernel of somebody's own.
    heads, kv_heads : int
        Query heads and key/value heads; ``kv_heads`` divides ``heads``. Both 1 for ``gemv``.
    head_dim : int
        Channels of a head, a multiple of 8; for ``gemv`` the matrix's columns. The matrix's rows are its tokens.
    precision : str
        A key of `PRECISIONS`, or for ``attend`` two of them, keys' and values': ``w8a8+w4a8``.
    query_rows : int
        Query positions decoded at once (a speculative block), or vectors of ``gemv``: 1 to 16.
    window : int
        Latest tokens that a query position sees, itself included; 0 for all of them. ``attend`` only.
    softcap : float
        Scores s become softcap·tanh(s / softcap); 0 leaves them. ``attend`` only.

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
    window: int = 0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        user = _USER_NAME.fullmatch(self.operator) is not None
        if self.operator not in OPERATORS and not user:
            raise ProblemError(f"unknown operator {self.operator!r}: choose one of {', '.join(OPERATORS)}")
        names = self.precision.split("+")
        if any(name not in PRECISIONS for name in names):
            raise ProblemError(f"unknown precision {self.precision!r}: choose one of {', '.join(PRECISIONS)}")
        if len(names) > (2 if self.operator == "attend" or user else 1):
            takes = "one or two precisions, keys' and values'" if self.operator == "attend" or user else "one precision"
            raise ProblemError(f"{self.operator} takes {takes}, not {self.precision}")
        if len(names) == 2 and names[0] == names[1]:
            object.__setattr__(self, "precision", names[0])
        for name in ("heads", "kv_heads", "head_dim", "query_rows", "window"):
            if not isinstance(getattr(self, name), int):
                raise ProblemError(f"{name} must be a whole number, not {getattr(self, name)!r}")
        if self.heads < 1 or self.kv_heads < 1:
            raise ProblemError(f"heads and kv-heads must be at least 1, not {self.heads} and {self.kv_heads}")
        if self.heads > MOST_HEADS:
            raise ProblemError(f"heads must be at most {MOST_HEADS}, not {self.heads}")
        if self.heads % self.kv_heads:
            raise ProblemError(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly")
        if self.operator == "gemv" and self.heads > 1:
            raise ProblemError(f"gemv has no heads, not {self.heads} of them")
        most = MOST_COLUMNS if self.operator == "gemv" or user else 1024
        if self.head_dim < 8 or self.head_dim % 8 or self.head_dim > most:
            name = "columns" if self.operator == "gemv" else "head_dim"
            raise ProblemError(f"{name} must be a multiple of 8 from 8 to {most}, not {self.head_dim}")
        if not 1 <= self.query_rows <= MAX_QUERY_ROWS:
            name = "vectors" if self.operator == "gemv" else "query rows"
            raise ProblemError(f"{name} must be 1 to {MAX_QUERY_ROWS}, not {self.query_rows}")
        if not 0 <= self.window <= 1 << 24 or not 0 <= self.softcap <= LARGEST_SOFTCAP:
            raise ProblemError(f"window and softcap cannot be {self.window} and {self.softcap}")
        if (self.window or self.softcap) and self.operator != "attend":
            raise ProblemError(f"{self.operator} has no softmax: window and softcap are for attend")

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Rows of the small operand that meet one key/value head: query heads of the group × query positions."""
        return self.group * self.query_rows

    @property
    def length_name(self) -> str:
        """What a length of the problem counts: ``tokens``, or ``rows`` of a matrix."""
        return "rows" if self.operator == "gemv" else "tokens"

    @property
    def roles(self) -> tuple[str, ...]:
        """Packed operands, of ``k`` and ``v``.

        Raises
        ------
        ProblemError
            If the operator is somebody's own kernel that this process has not imported.
        """
        roles = ROLES.get(self.operator) or _USER_ROLES.get(self.operator)
        if roles is None:
            raise ProblemError(f"{self.operator} is not defined here: import the module that defines the kernel first")
        return roles

    def stored(self, role: str) -> Precision:
        """How the operand in ``role`` is stored."""
        names = self.precision.split("+")
        return PRECISIONS[names[-1] if role == "v" else names[0]]

    def scale_groups(self, role: str) -> int:
        """Scales that a token of ``role`` has in one head; the last group may be short. Zero for fp16."""
        return 0 if self.stored(role).format == "fp16" else -(-self.head_dim // GROUP)

    def integer(self, role: str, pipeline: str) -> bool:
        """Whether ``pipeline`` contracts ``role`` in integers: fp16 has no codes, and stays in floats in each."""
        names = ("integer", "raw", "bfloat") if role == "k" else ("integer", "raw")
        return pipeline in names and self.stored(role).format != "fp16"

    @property
    def key(self) -> str:
        """The name stored in databases, for instance ``attend h32/8 d128 q1 w8a8`` or ``gemv k2048 c1 w4a8``."""
        if self.operator == "gemv":
            return f"gemv k{self.head_dim} c{self.query_rows} {self.precision}"
        name = f"{self.operator} h{self.heads}/{self.kv_heads} d{self.head_dim} q{self.query_rows} {self.precision}"
        window = f" window {self.window}" if self.window else ""
        return name + window + (f" softcap {self.softcap!r}".removesuffix(".0") if self.softcap else "")

    @classmethod
    def parse(cls, key: str) -> Self:
        """Inverse of `key`.

        Raises
        ------
        ProblemError
            If ``key`` is not such a name.
        """
        match = _KEY.fullmatch(key)
        if match is None or (match["operator"] == "gemv") != (match["heads"] is None):
            raise ProblemError(f"not a problem's name: {key!r}")
        try:
            softcap = float(match["softcap"] or 0)
        except ValueError:
            raise ProblemError(f"not a problem's name: {key!r}") from None
        return cls(
            operator=match["operator"],
            heads=int(match["heads"] or 1),
            kv_heads=int(match["kv_heads"] or 1),
            head_dim=int(match["head_dim"] or match["columns"]),
            precision=match["precision"],
            query_rows=int(match["rows"]),
            window=int(match["window"] or 0),
            softcap=softcap,
        )

    def with_operator(self, operator: str) -> Self:
        return replace(self, operator=operator)


def check_tokens(tokens: int, name: str = "tokens") -> int:
    """Return ``tokens`` if it is a context length, or a matrix's number of ``rows``, else raise `ProblemError`."""
    if isinstance(tokens, bool) or not isinstance(tokens, Integral):
        raise ProblemError(f"{name} must be a whole number, not {tokens!r}")
    if not 1 <= tokens <= MOST_TOKENS:
        raise ProblemError(f"{name} must be 1 to {MOST_TOKENS}, not {tokens}")
    return int(tokens)
