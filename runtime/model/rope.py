"""Rotary position embedding: which frequencies a file asks for.

Channels i and i + dims/2 of a head are a pair, which position p turns by p · frequency i; the rotated pair is then
multiplied by `Rope.scale`. Channels from ``dims`` on stay as they are.

Scalings are those of the files: ``linear`` divides every frequency by the factor; ``yarn`` divides only those that turn
less often than ``beta_slow`` times within the original context, none that turn more often than ``beta_fast`` times, and
blends in between (Peng et al. 2023, "YaRN"); a tensor ``rope_freqs.weight`` (Llama 3) divides each by its own factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .gguf_file import GgufFile
from .gguf_header import shown
from .weights import vector

FACTORS = "rope_freqs.weight"
LARGEST_FACTOR = 1e6


@dataclass(frozen=True)
class Yarn:
    """Where YaRN blends: the context that the model was trained on, and the turns within it."""

    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class Rope:
    """Rotation of the first ``dims`` channels of each head.

    Attributes
    ----------
    dims : int
        Even; at most the head dimension.
    base : float
    factor : float
        What frequencies are divided by; 1 for none.
    yarn : Yarn or None
        None divides all of them.
    factors : tuple of float
        More divisors, one for each frequency; empty for none.
    scale : float
        What rotated channels are multiplied by.
    """

    dims: int
    base: float = 10000.0
    factor: float = 1.0
    yarn: Yarn | None = None
    factors: tuple[float, ...] = ()
    scale: float = 1.0

    def frequencies(self) -> NDArray[np.float32]:
        """Radians that a position adds, shape (dims/2,)."""
        pair = np.arange(self.dims // 2, dtype=np.float64)
        plain = self.base ** (-2.0 * pair / self.dims)
        if self.factors:
            plain = plain / np.asarray(self.factors, np.float64)
        share = np.ones_like(plain)
        if self.yarn is not None:
            low = max(math.floor(self._pair_that_turns(self.yarn.beta_fast)), 0)
            high = min(math.ceil(self._pair_that_turns(self.yarn.beta_slow)), self.dims - 1)
            share = np.clip((pair - low) / max(high - low, 0.001), 0.0, 1.0)
        return np.asarray(plain / self.factor * share + plain * (1.0 - share), np.float32)

    def _pair_that_turns(self, turns: float) -> float:
        """The pair, not a whole number, that makes ``turns`` turns within the original context."""
        assert self.yarn is not None
        context = self.yarn.original_context
        return self.dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(self.base))

    @classmethod
    def read(cls, file: GgufFile, architecture: str, head_dim: int, context: int) -> Self:
        """What ``file`` says.

        Raises
        ------
        ModelError
            For scalings that are unsupported, named, and values that cannot be.
        """
        key = f"{architecture}.rope."
        dims = file.integer(key + "dimension_count", head_dim, least=2, largest=head_dim)
        if dims % 2:
            raise file.error(f"{key}dimension_count must be even, not {dims}")
        base = file.real(key + "freq_base", 10000.0, least=1.0001, largest=1e12)
        kind = file.text(key + "scaling.type", "linear")
        if kind not in ("none", "linear", "yarn"):
            raise file.error(f"{key}scaling.type {shown(kind)} is unsupported (supported: none, linear, yarn)")
        factor = 1.0
        if kind != "none":
            # Files write 0 where they mean that nothing is scaled.
            named = key + "scaling.factor" if key + "scaling.factor" in file else key + "scale_linear"
            least = 1.0 if kind == "yarn" else 0.0
            factor = file.real(named, 1.0, least=least, largest=LARGEST_FACTOR) or 1.0
        scale = file.real(key + "scaling.attn_factor", 1.0, least=1e-3, largest=1e3)
        yarn = None
        if kind == "yarn":
            yarn = Yarn(
                file.integer(key + "scaling.original_context_length", context, largest=1 << 31),
                file.real(key + "scaling.yarn_beta_fast", 32.0, least=1e-3, largest=1e6),
                file.real(key + "scaling.yarn_beta_slow", 1.0, least=1e-3, largest=1e6),
            )
            # As llama.cpp does, even where the file has a yarn_attn_factor.
            scale *= 1.0 + 0.1 * math.log(factor)
        return cls(dims, base, factor, yarn, cls._factors(file, dims), scale)

    @staticmethod
    def _factors(file: GgufFile, dims: int) -> tuple[float, ...]:
        if FACTORS not in file.tensors:
            return ()
        factors = vector(file, FACTORS)
        if len(factors) != dims // 2 or not (factors > 0).all():
            raise file.error(f"tensor {FACTORS!r} must hold {dims // 2} numbers above zero")
        return tuple(float(each) for each in factors)
