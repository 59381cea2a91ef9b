"""What is compared: one problem at one length, whose operands everyone stores in the same format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...kernels.errors import ProblemError
from ...kernels.problem import GROUP, PRECISIONS, Problem

PRECISION_OF = {precision.format: precision.name for precision in PRECISIONS.values()}
"""Names of precisions by what they store: ``int8`` is stored by ``w8a8``."""

PART_VALUES = 4 << 20
"""Most values of one operand that are made, quantised or checked at a time, to bound the memory it takes."""

TOLERANCE = 0.03
"""How far a result may be from float64 on the same stored operands, as ‖difference‖ / ‖expected‖ of a row.

Integer contractions round activations to 8 bits a group of 32: on the bench's inputs that moves an output by 1 to
1.5 %, whoever does it. Sums in 16 bits, as llama.cpp's of fp16 values, are off by 2.3 % at 32,768 tokens. A wrong
layout, scale or mask is off by far more.
"""


@dataclass(frozen=True)
class Part:
    """Rows ``start`` … ``stop`` (tokens, or a matrix's rows) of one key/value head."""

    head: int
    start: int
    stop: int


@dataclass(frozen=True)
class Case:
    """One problem, ``attend`` or ``gemv``, at one length.

    Parameters
    ----------
    problem : Problem
    tokens : int
        Context length, or a matrix's rows.
    name : str
        What a matrix is in its model.
    """

    problem: Problem
    tokens: int
    name: str = ""

    @property
    def kv(self) -> str:
        """Stored format: ``fp16``, ``int8`` or ``int4``; ``int8+int4`` for keys and values that differ."""
        return "+".join(dict.fromkeys(self.format(role) for role in self.problem.roles))

    def format(self, role: str) -> str:
        return self.problem.stored(role).format

    @property
    def key(self) -> str:
        return f"{self.problem.key}, {self.tokens} {'rows' if self.problem.operator == 'gemv' else 'tokens'}"

    @property
    def values(self) -> int:
        """Values of one packed operand."""
        return self.problem.kv_heads * self.tokens * self.problem.head_dim

    @property
    def nbytes(self) -> int:
        """Bytes that have to be read: codes, and an fp16 scale for each 32 of them."""
        problem, total = self.problem, 0
        rows = problem.kv_heads * self.tokens
        for role in problem.roles:
            total += rows * (problem.head_dim * problem.stored(role).bits // 8 + 2 * problem.scale_groups(role))
        return total

    @property
    def memory_bytes(self) -> int:
        """Least memory that preparing the operands takes: codes, one or two bytes each, and what is packed of them."""
        codes = sum(self.values * (2 if self.format(role) == "fp16" else 1) for role in self.problem.roles)
        return codes + self.nbytes

    def parts(self) -> Iterator[Part]:
        """Every row once, in order, in parts of at most `PART_VALUES` values."""
        step = max(PART_VALUES // self.problem.head_dim // GROUP * GROUP, GROUP)
        for head in range(self.problem.kv_heads):
            for start in range(0, self.tokens, step):
                yield Part(head, start, min(start + step, self.tokens))


def precision_for(formats: str) -> str:
    """The precision that stores ``formats``: ``w8a8`` for ``int8``, ``w8a8+w4a8`` for ``int8+int4``.

    Raises
    ------
    ProblemError
        For a format that does not exist, or more than two.
    """
    names: list[str] = []
    words = formats.split("+")
    if len(words) > 2:
        raise ProblemError(f"--kv takes one format, or keys' and values' with a + between, not {formats}")
    for name in words:
        if name not in PRECISION_OF:
            raise ProblemError(f"unknown format {name!r}: choose from {', '.join(PRECISION_OF)}")
        names.append(PRECISION_OF[name])
    return "+".join(names)
