"""What a backend's kernels are held to before they are timed: operands, and what should come of them.

Operators have one set of operands of which shorter contexts are prefixes. Somebody's own kernel says itself what it is
called with at each context length, and what is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..kernels.backend import Backend
from ..kernels.problem import Problem
from ..kernels.quantize import quantize
from ..kernels.reference import Operands, make_operands
from ..kernels.user import Definition, Trial
from .check import AWKWARD_TOKENS, Expectation, Expected, awkward, expect
from .operands import PackedOperands

ONE_LESS_TOKENS = 2048
"""Up to this context length a candidate is also checked one token short of it."""


class Truth:
    """The operators' own: `lowbit.kernels.reference`. Keeps nothing.

    Parameters
    ----------
    seed : int
        Of the operands.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def operands(self, problem: Problem, tokens: int) -> Operands:
        """Operands of a context of ``tokens``; ``x`` is whatever a kernel takes before its packed operands."""
        return make_operands(problem, tokens, self._seed)

    def lengths(self, tokens: int) -> list[int]:
        """Context lengths to check on operands of ``tokens``: this one, and short ones one token short of it too."""
        return [tokens, tokens - 1] if 1 < tokens <= ONE_LESS_TOKENS else [tokens]

    def expect(self, problem: Problem, operands: Operands, tokens: int, pipeline: str) -> Expectation:
        """What the first ``tokens`` of ``operands`` should give."""
        some = operands.k if operands.k is not None else operands.v
        assert some is not None  # each operator packs at least one operand
        return expect(problem, operands if tokens == some.codes.shape[1] else operands.first(tokens), pipeline)

    def awkward(self, problem: Problem, pipeline: str) -> list[tuple[int, Expectation, PackedOperands]]:
        """Context lengths that fit no tile, each with what should come of it and operands that hold it."""
        found = list(awkward(problem, pipeline, self._seed))
        packed = PackedOperands(found[-1][1].operands, 0)  # operands of the longest prefix hold all the others
        return [(tokens, expectation, packed) for tokens, expectation in found]


class UserTruth(Truth):
    """What the author of a kernel says: inputs, reference and tolerance. Every length has inputs of its own."""

    def __init__(self, definition: Definition, seed: int) -> None:
        super().__init__(seed)
        self._definition = definition

    def operands(self, problem: Problem, tokens: int) -> Operands:
        inputs = self._definition.inputs(tokens, self._seed)
        quantized = {
            role: quantize(values, problem.stored(role), self._definition.roles[role])
            for role, values in inputs.packed.items()
        }
        stored = {role: each.dequantize() for role, each in quantized.items()}
        trial = Trial(inputs, self._definition.expected(inputs.arrays, stored))
        return Operands(cast(Any, trial), quantized.get("k"), quantized.get("v"))

    def lengths(self, tokens: int) -> list[int]:
        return [tokens]

    def expect(self, problem: Problem, operands: Operands, tokens: int, pipeline: str) -> Expectation:
        expected = cast(Any, operands.x).expected
        definition = self._definition
        return UserExpectation(operands, (Expected(slice(None), expected),), definition.tolerance, definition)

    def awkward(self, problem: Problem, pipeline: str) -> list[tuple[int, Expectation, PackedOperands]]:
        found = []
        for tokens in AWKWARD_TOKENS:
            operands = self.operands(problem, tokens)
            found.append((tokens, self.expect(problem, operands, tokens, pipeline), PackedOperands(operands, 0)))
        return found


@dataclass(frozen=True)
class UserExpectation(Expectation):
    """What a kernel's author expects of it."""

    definition: Definition

    def error(self, result: NDArray[np.floating[Any]]) -> float:
        return self.definition.error(result, self.expected[0].values)


def truth_of(backend: Backend, seed: int) -> Truth:
    """What the kernels of ``backend`` are held to."""
    definition = getattr(backend, "definition", None)
    return UserTruth(definition, seed) if isinstance(definition, Definition) else Truth(seed)
