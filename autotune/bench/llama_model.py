"""llama.cpp as a whole model, through the C interface that llama-cpp-python declares.

Sessions answer as `lowbit.runtime.model` sessions do, so that comparisons treat both alike.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...kernels.errors import ModelError
from .contestant import Absent
from .ggml import TYPES

Float32 = NDArray[np.float32]

MODULE, DISTRIBUTION = "llama_cpp", "llama-cpp-python"
BATCH = 512
"""Most tokens of one call, llama.cpp's own physical batch."""
_ERROR = 4
"""GGML_LOG_LEVEL_ERROR"""


class LlamaModel:
    """A model that llama.cpp has loaded; freed with it, after its sessions.

    Parameters
    ----------
    path : Path
    threads : int

    Raises
    ------
    Absent
        If llama-cpp-python is not installed, or its library cannot be loaded.
    ModelError
        If llama.cpp cannot load the file, with its reason.
    """

    def __init__(self, path: Path, threads: int) -> None:
        if importlib.util.find_spec(MODULE) is None:
            raise Absent(f"not installed: pip install {DISTRIBUTION}")
        try:
            self.library: Any = importlib.import_module(MODULE)
        except Exception as error:
            raise Absent(f"{DISTRIBUTION} cannot be loaded: {' '.join(str(error).split())}") from error
        self.version = f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}"
        self.threads = threads
        self._said = ""
        self._log = self.library.llama_log_callback(self._hear)
        self.library.llama_log_set(self._log, None)
        self.library.llama_backend_init()
        parameters = self.library.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.handle: Any = self.library.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.handle:
            raise ModelError(f"{path}: llama.cpp cannot load it: {self._said or 'it does not say why'}")
        self._vocabulary: Any = self.library.llama_model_get_vocab(self.handle)
        self.vocabulary = int(self.library.llama_vocab_n_tokens(self._vocabulary))

    def _hear(self, level: int, text: bytes, data: object) -> None:
        if level == _ERROR and not self._said:
            self._said = " ".join(text.decode(errors="replace").split())

    def tokenize(self, text: str) -> list[int]:
        """``text`` in tokens, with those in front that the model wants there."""
        raw = text.encode()
        room = len(raw) + 16
        tokens = (ctypes.c_int32 * room)()
        count = self.library.llama_tokenize(self._vocabulary, raw, len(raw), tokens, room, True, False)
        return tokens[:count]

    def session(
        self, context: int, cache_type_k: str = "f16", cache_type_v: str = "f16", flash_attention: bool = True
    ) -> LlamaSession:
        """An empty cache.

        Parameters
        ----------
        context : int
            Tokens that it has room for.
        cache_type_k, cache_type_v : str
            ``f16``, ``q8_0`` or ``q4_0``; quantised values need flash attention.
        flash_attention : bool

        Raises
        ------
        MemoryError
            If llama.cpp cannot make it.
        """
        parameters = self.library.llama_context_default_params()
        parameters.n_ctx = context
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.type_k, parameters.type_v = TYPES[cache_type_k], TYPES[cache_type_v]
        parameters.flash_attn_type = int(flash_attention)
        parameters.no_perf = True
        self._said = ""
        handle = self.library.llama_init_from_model(self.handle, parameters)
        if not handle:
            raise MemoryError(f"llama.cpp cannot make a cache of {context} tokens: {self._said}")
        return LlamaSession(self, handle)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.llama_model_free(self.handle)


class LlamaSession:
    """A cache of one sequence, and the computation on it. Made by `LlamaModel.session`; used by one thread."""

    def __init__(self, model: LlamaModel, handle: Any) -> None:
        self.model = model
        self.length = 0
        self._handle = handle
        self._library = model.library
        self._memory = self._library.llama_get_memory(handle)
        self._batch = self._library.llama_batch_init(BATCH, 0, 1)
        for index in range(BATCH):
            self._batch.n_seq_id[index] = 1
            self._batch.seq_id[index][0] = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prefill(self, tokens: Sequence[int]) -> Float32:
        """Compute ``tokens``; logits (vocabulary,) after the last, a view that is valid until the next call."""
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            self._decode(part, last_only=True)
        last: Float32 = self._logits(1)[0]
        return last

    def step(self, token: int) -> Float32:
        """`prefill` of one token."""
        return self.prefill((token,))

    def scores(self, tokens: Sequence[int]) -> Iterator[tuple[int, Float32]]:
        """Index of the first token and logits (n, vocabulary) of each batch; views as those of `prefill`."""
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            self._decode(part, last_only=False)
            yield start, self._logits(len(part))

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        if length < self.length and not self._library.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise RuntimeError(f"llama.cpp cannot forget tokens from {length} on")
        self.length = min(self.length, length)

    def close(self) -> None:
        """Free it; may be repeated."""
        if self._handle:
            self._library.llama_batch_free(self._batch)
            self._library.llama_free(self._handle)
            self._handle = None

    def _decode(self, tokens: Sequence[int], last_only: bool) -> None:
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = self.length + index
            batch.logits[index] = not last_only or index == count - 1
        status = self._library.llama_decode(self._handle, batch)
        if status:
            raise RuntimeError(f"llama.cpp cannot decode {count} tokens after {self.length}: status {status}")
        self._library.llama_synchronize(self._handle)
        self.length += count

    def _logits(self, rows: int) -> Float32:
        values = self._library.llama_get_logits(self._handle)
        logits: Float32 = np.ctypeslib.as_array(values, shape=(rows, self.model.vocabulary))
        return logits

    def __del__(self) -> None:
        self.close()
