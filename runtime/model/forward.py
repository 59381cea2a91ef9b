"""The native program of a block of positions: from their tokens to logits, with no Python between the layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...kernels import append_fields
from ...kernels.rowwise_fields import Center, Gate, Normalise, Rotate, Turn
from ..attention import SegmentedAttention
from ..kvcache import KVCache
from .config import Config
from .network import Layer, Network, Stack
from .program import Program, fields_of
from .stored import Stored

Float32 = NDArray[np.float32]


class ForwardPass:
    """One forward pass of ``positions`` tokens that follow a cache's last one.

    Parameters
    ----------
    network : Network
    config : Config
    cache : KVCache
    attention : SegmentedAttention
        Of as many positions.
    program : Program
        Empty.
    scores : str
        Whose logits to compute: ``last``, ``all``, or ``none``.
    stored : Stored
        What keys and values go through before they are stored.

    Attributes
    ----------
    positions : int
    logits : ndarray of float32, shape (rows, vocabulary)
        Of all positions, the last one, or none; overwritten by each pass.
    """

    def __init__(
        self,
        network: Network,
        config: Config,
        cache: KVCache,
        attention: SegmentedAttention,
        program: Program,
        scores: str,
        stored: Stored,
    ) -> None:
        self._stored = stored
        self._config, self._cache, self._attention, self._program = config, cache, attention, program
        self.positions = positions = attention.queries.shape[1]
        self._many = program.threads if positions > 1 else 1
        self._ids = np.zeros(positions, np.int32)
        program.keep(self._ids)
        width, half = config.width, config.rope.dims // 2
        self._frequencies = config.rope.frequencies().astype(np.float64)
        self._cos, self._sin = program.floats(positions, half), program.floats(positions, half)
        self._stream, self._normed = program.floats(positions, width), program.floats(positions, width)
        self._keys, self._values = (program.floats(config.kv_heads, positions, config.head_dim) for _ in range(2))
        self._attend_stages: list[int] = []
        self._centers = np.zeros((config.layers, len(Center)), np.int64)
        network.embedding.embed(program, self._ids, self._stream)
        added = None
        for index, layer in enumerate(network.layers):
            self._attention_stages(layer, index, added)
            added = self._hidden_stages(layer)
        self.logits = self._scores(network, added, scores)
        self._stages, self._run = program.finished()
        self._limits = self._stages[self._attend_stages, 3]

    def run(self, tokens: NDArray[np.int32], splits: int, threads: int) -> None:
        """Pass ``tokens``, which the cache has counted already.

        Parameters
        ----------
        tokens : ndarray of int32, shape (positions,)
        splits, threads : int
            Shares of the context in attention, and threads that decode them.
        """
        self._ids[:] = tokens
        self._turn(self._cache.length - self.positions)
        jobs = self._cache.jobs
        jobs[:, append_fields.SOURCE_K], jobs[:, append_fields.SOURCE_V] = self._sources
        jobs[:, append_fields.SOURCE_TOKEN_BYTES] = self._keys.strides[1]
        jobs[:, append_fields.SOURCE_HEAD_BYTES] = self._keys.strides[0]
        if self._stored.means is not None:
            self._centers[:, Center.LEARN] = self._stored.learns(self._cache.length, self.positions)
        if self._attention.prepare(splits):
            self._stages[self._attend_stages, 2] = self._attention.tasks
        if threads != self._limits[0]:
            self._limits[:] = threads
            self._stages[self._attend_stages, 3] = threads
        self._run()

    @property
    def _sources(self) -> tuple[int, int]:
        return self._keys.ctypes.data, self._values.ctypes.data

    def _turn(self, first: int) -> None:
        """Rotations of the positions from ``first`` on."""
        angles = np.arange(first, first + self.positions)[:, None] * self._frequencies
        scale = self._config.rope.scale
        np.multiply(np.cos(angles), scale, out=self._cos, casting="same_kind")
        np.multiply(np.sin(angles), scale, out=self._sin, casting="same_kind")

    def _normalise(self, weight: Float32, added: Float32 | None, x: Float32, out: Float32) -> None:
        job = fields_of(
            Normalise, x=x, add=0 if added is None else added, weight=weight, eps=self._config.norm_eps, out=out,
            width=self._config.width,
        )  # fmt: skip
        self._program.add("normalise", job, len(x), self._many)

    def _attention_stages(self, layer: Layer, index: int, added: Float32 | None) -> None:
        program, config, cache, attention = self._program, self._config, self._cache, self._attention
        self._normalise(layer.attention_norm, added, self._stream, self._normed)
        parts = self._multiply(layer.qkv, self._normed)
        sources = {}
        for role, (buffer, first) in zip("qkv", parts, strict=True):
            sources[role] = buffer.ctypes.data + 4 * first
            sources[f"{role}_stride"] = buffer.shape[1]
        biases = dict(zip(("q_bias", "k_bias", "v_bias"), layer.biases or (), strict=False))
        norms = dict(zip(("q_norm", "k_norm"), layer.head_norms or (), strict=False))
        job = fields_of(
            Rotate, **sources, **biases, **norms, eps=config.norm_eps, cos=self._cos, sin=self._sin,
            dims=config.rope.dims, heads=config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim,
            positions=self.positions, k_turn=self._stored.k_turn, v_turn=self._stored.v_turn,
            queries=attention.queries, keys=self._keys, values=self._values,
        )  # fmt: skip
        program.add("rotate", job, self.positions, self._many)
        if self._stored.means is not None:
            job = self._centers[index]
            job[:] = fields_of(
                Center, keys=self._keys, mean=self._stored.means[index], positions=self.positions,
                head_dim=config.head_dim,
            )  # fmt: skip
            program.add("center", job, config.kv_heads, self._many)
        program.add("append", cache.jobs[index], 2 * config.kv_heads, self._many)
        self._attend_stages.append(
            program.add(attention.attend, attention.jobs[index], attention.tasks, program.threads)
        )
        program.add(attention.merge, attention.jobs[index], config.kv_heads, self._many)
        if self._stored.v_turn:
            job = fields_of(Turn, x=attention.out, width=attention.out.shape[1], block=self._stored.v_turn)
            program.add("turn", job, self.positions, self._many)
        out = program.reused("attention", self.positions, config.width)
        layer.output.multiply(program, attention.out, out)
        self._normalise(layer.hidden_norm, out, self._stream, self._normed)

    def _hidden_stages(self, layer: Layer) -> Float32:
        program, config = self._program, self._config
        (gate, first_gate), (up, first_up) = self._multiply(layer.gate_up, self._normed)
        gated = program.reused("gated", self.positions, config.hidden)
        job = fields_of(
            Gate, gate=gate.ctypes.data + 4 * first_gate, up=up.ctypes.data + 4 * first_up, stride=gate.shape[1],
            out=gated, width=config.hidden,
        )  # fmt: skip
        program.add("gate", job, self.positions, self._many)
        out = program.reused("down", self.positions, config.width)
        layer.down.multiply(program, gated, out)
        return out

    def _multiply(self, stack: Stack, x: Float32) -> list[tuple[Float32, int]]:
        """Where each of the stacked tensors' products are: an array, and their first column in it."""
        outs = [
            self._program.reused(f"product {position}", self.positions, matrix.rows)
            for position, matrix in enumerate(stack.matrices)
        ]
        for matrix, out in zip(stack.matrices, outs, strict=True):
            matrix.multiply(self._program, x, out)
        return [(outs[which], first) for which, first, _ in stack.rows]

    def _scores(self, network: Network, added: Float32 | None, which: str) -> Float32:
        config, program = self._config, self._program
        if which == "none":
            return np.zeros((0, config.vocabulary), np.float32)
        first = 0 if which == "all" else self.positions - 1
        stream, normed = self._stream[first:], self._normed[first:]
        self._normalise(network.last_norm, None if added is None else added[first:], stream, normed)
        logits = program.floats(len(stream), config.vocabulary)
        network.head.multiply(program, normed, logits)
        return logits
