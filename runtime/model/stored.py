"""What keys and values go through before they are stored in few bits.

Codes of a group share a scale, so that one large channel costs all the others their digits. Two things that attention
does not notice make channels alike:

- Keys and values go through a Hadamard transform of their channels, which spreads outliers over a block. Dot products
  stay as they are if queries go through it, too; results of attention go through it once more, for it is its own
  inverse.
- Keys are stored relative to the mean of those of a sequence's first pass: what all keys of a head share, a bias for
  instance, moves all scores of a query alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_POSITIONS = 32
"""Keys whose mean is worth subtracting. Those of a few tokens are further from later ones than zero is."""


@dataclass(frozen=True)
class Stored:
    """How one sequence's keys and values differ from what they are computed as.

    Attributes
    ----------
    k_turn, v_turn : int
        Channels of a block that is transformed, a power of two; 0 for none.
    means : ndarray of float32, shape (layers, kv_heads, head_dim), or None
        What keys are stored relative to, learnt by the sequence's first pass; None if they are stored as they are.
    """

    k_turn: int
    v_turn: int
    means: NDArray[np.float32] | None

    @classmethod
    def of(cls, k_format: str, v_format: str, layers: int, kv_heads: int, head_dim: int) -> Stored:
        """For formats of keys and values; fp16 has a scale for each number, and needs none of this."""
        block = head_dim & -head_dim
        k_turn, v_turn = (0 if each == "fp16" else block for each in (k_format, v_format))
        return cls(k_turn, v_turn, np.zeros((layers, kv_heads, head_dim), np.float32) if k_turn else None)

    def learns(self, length: int, positions: int) -> bool:
        """Whether the pass that brings a sequence to ``length`` tokens learns the means of its keys.

        The first one does, if it is long enough to know more than a few keys; a short one forgets what was learnt.
        """
        first = length == positions
        if first and self.means is not None:
            self.means[:] = 0
        return first and positions >= LEAST_POSITIONS

    def fork(self) -> Stored:
        """For a sequence that begins with the same tokens, and may begin anew."""
        return Stored(self.k_turn, self.v_turn, None if self.means is None else self.means.copy())
