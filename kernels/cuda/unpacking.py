"""From packed words to words of four codes that ``dp4a`` takes, and which four of the small operand meet them.

A *bundle* is one vector, or four vectors along the reduced axis whose bytes have to be transposed first because
neighbouring codes belong to different outputs. Unpacking a bundle gives *dot words*; each has one output, four reduced
indices and a weight: high nibbles are left where they are, 16 times their value. The small operand is stored in the
order in which dot words consume it, so that no packing needs its codes put back in order; one that is declared
``in_order`` has it done all the same, to show what that costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..packing import Packing
from .mapping import Infeasible, Tiling
from .ops import AND_AND, AND_XOR, Ops, Value

LOW, HIGH = 0x0F0F0F0F, 0xF0F0F0F0
MIDDLES = 0x88888888


@dataclass(frozen=True)
class DotWord:
    """Four codes of one output.

    Attributes
    ----------
    output : int
        Index into the vector's `Vectors.outputs_each`.
    small : int
        Which word of the bundle's small operand it meets.
    high : bool
        Whether its bytes are 16 times the codes.
    """

    output: int
    small: int
    high: bool


@dataclass(frozen=True)
class Unpacking:
    """How a tiling's vectors are unpacked.

    Attributes
    ----------
    packing : Packing
    pipeline : str
        ``integer`` or ``raw``.
    vectors : int
        Of a bundle: 1, or 4 that are transposed.
    words : tuple of DotWord
        In the order in which `unpack` yields values.
    small : tuple of tuple of int
        For each word of the bundle's small operand its four reduced positions: vector · codes along r + index into
        `Vectors.reduced_each`.
    """

    packing: Packing
    pipeline: str
    vectors: int
    words: tuple[DotWord, ...]
    small: tuple[tuple[int, ...], ...]

    @property
    def offset(self) -> int:
        """What unpacked codes exceed their value by: 4-bit ones are offset codes once unpacked, whatever they were."""
        return 8 if self.packing.bits == 4 else self.packing.offset

    @property
    def scale(self) -> int:
        """What sums of dot words have to be divided by."""
        return 16 if any(word.high for word in self.words) else 1

    @property
    def signed(self) -> bool:
        """Whether unpacked bytes are signed."""
        return self.packing.bits == 8 and self.packing.coding == "signed"


def plan(tiling: Tiling, packing: Packing, pipeline: str) -> Unpacking:
    """How to unpack ``tiling``.

    Raises
    ------
    Infeasible
        If no four codes of one output can be brought into a word.
    """
    if pipeline == "raw" and (packing.bits != 4 or packing.coding != "offset" or packing.in_order):
        raise Infeasible(f"{packing.name}: the raw pipeline is for 4-bit offset codes whose order is left as it is")
    patterns = [_pattern(tiling, part) for part in _parts(tiling, packing)]
    if all(len(outputs) == 1 for outputs, _ in patterns):
        return _direct(tiling, packing, pipeline)
    if pipeline == "integer" and all(len(outputs) == 4 and len(rs) == 1 for outputs, rs in patterns):
        return _transposed(tiling, packing)
    raise Infeasible(f"{packing.name}: the codes of a word belong to several outputs and to several of what is summed")


def _parts(tiling: Tiling, packing: Packing) -> list[list[int]]:
    """Code numbers of each word of bytes: the words themselves, or their low and their high nibbles."""
    codes, per_word = len(tiling.vectors.code_o), 32 // packing.bits
    found = []
    for first in range(0, codes, per_word):
        word = list(range(first, first + per_word))
        found += [word] if packing.bits == 8 else [word[0::2], word[1::2]]
    return found


def _pattern(tiling: Tiling, part: Sequence[int]) -> tuple[list[int], list[int]]:
    """Distinct output and reduced offsets of some codes."""
    vectors = tiling.vectors
    return list(dict.fromkeys(vectors.code_o[p] for p in part)), list(dict.fromkeys(vectors.code_r[p] for p in part))


def _direct(tiling: Tiling, packing: Packing, pipeline: str) -> Unpacking:
    vectors = tiling.vectors
    parts = _parts(tiling, packing)
    in_order = packing.in_order and packing.bits == 4
    if in_order:
        # Low and high nibbles of a word are merged, if they belong to one output.
        merged = []
        for low, high in zip(parts[0::2], parts[1::2], strict=True):
            both = sorted((*low, *high))
            if len(_pattern(tiling, both)[0]) > 1:
                in_order = False
                break
            merged += [both[:4], both[4:]]
        parts = merged if in_order else parts
    small: dict[tuple[int, ...], int] = {}
    words = []
    for number, part in enumerate(parts):
        output = vectors.outputs_each.index(vectors.code_o[part[0]])
        positions = tuple(vectors.reduced_each.index(vectors.code_r[p]) for p in part)
        index = small.setdefault(positions, len(small))
        words.append(DotWord(output, index, packing.bits == 4 and not in_order and number % 2 == 1))
    return Unpacking(packing, pipeline, 1, tuple(words), tuple(small))


def _transposed(tiling: Tiling, packing: Packing) -> Unpacking:
    vectors = tiling.vectors
    if tiling.iters_r % 4:
        raise Infeasible(f"{packing.name}: {tiling.iters_r} vectors along what is summed cannot be transposed by fours")
    words: list[DotWord] = []
    small: dict[tuple[int, ...], int] = {}
    each = len(vectors.reduced_each)
    for number, part in enumerate(_parts(tiling, packing)):
        index = vectors.reduced_each.index(vectors.code_r[part[0]])
        place = small.setdefault(tuple(vector * each + index for vector in range(4)), len(small))
        high = packing.bits == 4 and number % 2 == 1
        words += [DotWord(vectors.outputs_each.index(vectors.code_o[p]), place, high) for p in part]
    return Unpacking(packing, "integer", 4, tuple(words), tuple(small))


def unpack(ops: Ops, plan: Unpacking, bundle: Sequence[Sequence[Value]]) -> list[Value]:
    """Dot words of a bundle, in the order of ``plan.words``.

    Parameters
    ----------
    bundle : sequence of sequence of Value
        The words of each of its vectors.
    """
    parts = [_split(ops, plan, words) for words in bundle]
    if plan.vectors == 1:
        return parts[0]
    return [word for four in zip(*parts, strict=True) for word in transpose(ops, four)]


def _split(ops: Ops, plan: Unpacking, words: Sequence[Value]) -> list[Value]:
    if plan.packing.bits == 8:
        return list(words)
    found = []
    for word in words:
        if plan.packing.in_order and plan.vectors == 1 and not any(each.high for each in plan.words):
            low, high = _nibbles(ops, plan, word, LOW), _nibbles(ops, plan, ops.shift_right(word, 4), LOW)
            found += [ops.prmt(low, high, 0x5140), ops.prmt(low, high, 0x7362)]
        else:
            found += [_nibbles(ops, plan, word, LOW), _nibbles(ops, plan, word, HIGH)]
    return found


def _nibbles(ops: Ops, plan: Unpacking, word: Value, mask: int) -> Value:
    """Low nibbles, or high ones times 16, as bytes. Flipping the upper bit makes two's complement an offset code."""
    if plan.packing.coding == "signed":
        return ops.lop3(word, mask, MIDDLES & mask, AND_XOR)
    return ops.lop3(word, mask, 0, AND_AND)


def transpose(ops: Ops, rows: Sequence[Value]) -> list[Value]:
    """The four columns of a 4 × 4 matrix of bytes whose rows are words."""
    a, b, c, d = rows
    low_ab, high_ab = ops.prmt(a, b, 0x5140), ops.prmt(a, b, 0x7362)
    low_cd, high_cd = ops.prmt(c, d, 0x5140), ops.prmt(c, d, 0x7362)
    return [
        ops.prmt(low_ab, low_cd, 0x5410),
        ops.prmt(low_ab, low_cd, 0x7632),
        ops.prmt(high_ab, high_cd, 0x5410),
        ops.prmt(high_ab, high_cd, 0x7632),
    ]


def order(tiling: Tiling, plan: Unpacking) -> tuple[int, ...]:
    """Reduced index at each byte of the small operand, in the order in which lanes read it.

    Bundle q of r_lane begins at byte (q · lanes_r + r_lane) · bundle bytes.
    """
    reduced, each = tiling.vectors.reduced, tiling.vectors.reduced_each
    found = []
    for q in range(tiling.iters_r // plan.vectors):
        for r_lane in range(tiling.lanes_r):
            for word in plan.small:
                for position in word:
                    vector, index = divmod(position, len(each))
                    b = (q * plan.vectors + vector) * tiling.lanes_r + r_lane
                    found.append(int(reduced[b]) + each[index])
    assert len(np.unique(found)) == len(found)
    return tuple(found)
