from __future__ import annotations

import numpy as np
import pytest
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import PackedTensor, pack
from lowbit.kernels.problem import Problem
from lowbit.kernels.quantize import quantize
from lowbit.search import chill
from lowbit.search.chill import Chill


def packed(layout: str) -> PackedTensor:
    values = np.random.default_rng(1).standard_normal((2, 96, 64)).astype(np.float32)
    precision = "fp16" if layout.endswith("fp16") else "w8a8"
    return pack(quantize(values, Problem("qk", 2, 2, 64, precision).stored("k"), "k"), Layout.parse(layout))


def test_packed_operands_are_evicted_whole_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(chill, "evict", lambda address, nbytes: seen.append((address, nbytes)))
    x, k, v, other = np.ones(64), packed("T D | int8/bytes/signed"), packed("T D | fp16"), packed("T D | fp16")
    assert Chill([(x, k, v), (x, k, other)], 1)()
    whole = {(a.ctypes.data, a.nbytes) for each in (k, v, other) for a in (each.words, each.scales) if a.nbytes}
    assert set(seen) == whole and len(seen) == len(whole) == 4


def test_threads_are_woken_after_the_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []
    monkeypatch.setattr(chill, "evict", lambda address, nbytes: order.append("evict"))

    def wake(threads: int) -> bool:
        order.append(threads)
        return len(order) < 3

    monkeypatch.setattr(chill, "wake", wake)
    each = Chill([(packed("T D | fp16"),)], 3)
    assert each() and order == ["evict", 3]
    assert not each()
