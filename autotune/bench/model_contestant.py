"""The seam between the comparison of whole models and whoever runs them."""

from __future__ import annotations

import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...kernels.errors import ProblemError
from ...runtime.cache_types import CacheTypes
from .contestant import Unsupported
from .model_messages import ModelSetup

Float32 = NDArray[np.float32]

MODEL_NAMES = ("lowbit", "llama_cpp")
PLAIN = "llama_cpp_plain"
"""llama.cpp without flash attention, which joins where values are f16: it may be the faster way then."""


class Decoder(Protocol):
    """A cache of one sequence; sessions of this project and of llama.cpp are."""

    def prefill(self, tokens: Sequence[int]) -> Float32:
        """Logits after the last of ``tokens``."""

    def step(self, token: int) -> Float32:
        """Logits after ``token``."""

    def truncate(self, length: int) -> None:
        """Forget all but the first tokens."""


class ModelContestant(ABC):
    """One implementation, living in a worker process of its own. Nothing is imported or loaded before `open`.

    Attributes
    ----------
    vocabulary : int
        Tokens; known once it is open.
    """

    vocabulary: int

    @abstractmethod
    def open(self, setup: ModelSetup) -> str:
        """Load the model and return the implementation's version.

        Raises
        ------
        Absent
            If the implementation is not installed or cannot be used.
        LowbitError
            If it cannot load the model.
        """

    @abstractmethod
    def session(self, types: CacheTypes, context: int) -> Decoder:
        """An empty cache with room for ``context`` tokens.

        Raises
        ------
        Unsupported
            If it has no such cache.
        """


class LowbitModel(ModelContestant):
    """This project's decoder."""

    def open(self, setup: ModelSetup) -> str:
        from ... import __version__
        from ...kernels.backend import backend_named
        from ...runtime.model.model import Model

        warnings.simplefilter("ignore")  # what is not tuned is said where tuning could be done
        self._model = Model.load(setup.model, database=setup.database, threads=setup.threads)
        self.vocabulary = self._model.config.vocabulary
        backend = backend_named("cpu")
        return f"{__version__} ({backend.target()}; {backend.toolchain()})"

    def session(self, types: CacheTypes, context: int) -> Decoder:
        return self._model.session(context, types.k, types.v)


class LlamaCppModel(ModelContestant):
    """llama.cpp with flash attention, which its own benchmark uses by default where the device has it."""

    flash_attention = True

    def open(self, setup: ModelSetup) -> str:
        from .llama_model import LlamaModel

        self._model = LlamaModel(setup.model, setup.threads)
        self.vocabulary = self._model.vocabulary
        return self._model.version

    def session(self, types: CacheTypes, context: int) -> Decoder:
        if types.v != "f16" and not self.flash_attention:
            raise Unsupported("quantised values need flash attention")
        return self._model.session(context, types.k, types.v, self.flash_attention)


class LlamaCppPlainModel(LlamaCppModel):
    """llama.cpp without flash attention."""

    flash_attention = False


_MADE_BY: dict[str, Callable[[], ModelContestant]] = {
    "lowbit": LowbitModel,
    "llama_cpp": LlamaCppModel,
    PLAIN: LlamaCppPlainModel,
}


def model_contestant_named(name: str) -> ModelContestant:
    """The contestant called ``name``, or what ``module:callable`` makes.

    Raises
    ------
    ProblemError
        If there is none.
    """
    if name in _MADE_BY:
        return _MADE_BY[name]()
    if ":" not in name:
        raise ProblemError(f"unknown implementation {name!r}: choose from {', '.join(MODEL_NAMES)}")
    module, _, attribute = name.partition(":")
    made = getattr(importlib.import_module(module), attribute)()
    assert isinstance(made, ModelContestant)
    return made
