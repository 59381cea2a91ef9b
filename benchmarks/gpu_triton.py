"""Decode attention in Triton, fp16: ranges of tokens in parallel, then a merge. Needs Triton and PyTorch."""

# ruff: noqa: E741, N803

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

SPLITS, BLOCK, ROWS = 32, 64, 16


@triton.jit
def attend(q, k, v, sums, most, total, tokens, scale, D: tl.constexpr, G: tl.constexpr, S: tl.constexpr, B: tl.constexpr, R: tl.constexpr):  # fmt: skip  # noqa: E501
    head, split = tl.program_id(0), tl.program_id(1)
    rows, d = tl.arange(0, R), tl.arange(0, D)
    asked = tl.load(q + (head * G + rows[:, None]) * D + d[None, :], mask=rows[:, None] < G, other=0.0)
    share = tl.cdiv(tl.cdiv(tokens, S), B) * B
    start = split * share
    end = tl.minimum(start + share, tokens)
    m = tl.full((R,), -1e30, tl.float32)
    l = tl.zeros((R,), tl.float32)
    acc = tl.zeros((R, D), tl.float32)
    for t in range(start, end, B):
        n = t + tl.arange(0, B)
        inside = n < end
        keys = tl.load(k + (head * tokens + n[:, None]) * D + d[None, :], mask=inside[:, None], other=0.0)
        s = tl.dot(asked, tl.trans(keys)) * scale
        s = tl.where(inside[None, :], s, -1e30)
        higher = tl.maximum(m, tl.max(s, 1))
        p = tl.where(inside[None, :], tl.exp(s - higher[:, None]), 0.0)
        c = tl.exp(m - higher)
        l = l * c + tl.sum(p, 1)
        values = tl.load(v + (head * tokens + n[:, None]) * D + d[None, :], mask=inside[:, None], other=0.0)
        acc = acc * c[:, None] + tl.dot(p.to(tl.float16), values)
        m = higher
    place = (head * S + split) * R + rows
    tl.store(most + place, m)
    tl.store(total + place, l)
    tl.store(sums + place[:, None] * D + d[None, :], acc)


@triton.jit
def merge(sums, most, total, out, D: tl.constexpr, G: tl.constexpr, S: tl.constexpr, R: tl.constexpr):
    head, row = tl.program_id(0), tl.program_id(1)
    splits, d = tl.arange(0, S), tl.arange(0, D)
    place = (head * S + splits) * R + row
    m = tl.load(most + place)
    w = tl.exp(m - tl.max(m, 0))
    norm = tl.sum(w * tl.load(total + place), 0)
    parts = tl.load(sums + place[:, None] * D + d[None, :])
    result = tl.sum(parts * w[:, None], 0) / norm
    tl.store(out + (head * G + row) * D + d, result.to(tl.float16))


def split(q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """A call that attends with queries (1, heads, 1, head_dim) to keys and values (1, kv_heads, tokens, head_dim).

    Each of `SPLITS` programs takes a range of tokens of one key/value head, for all its query heads.
    """
    heads, kv_heads, tokens, dim = q.shape[1], k.shape[1], k.shape[2], q.shape[3]
    group = heads // kv_heads
    sums = torch.empty((kv_heads, SPLITS, ROWS, dim), dtype=torch.float32, device=q.device)
    most, total = (torch.empty((kv_heads, SPLITS, ROWS), dtype=torch.float32, device=q.device) for _ in range(2))
    out = torch.empty_like(q)

    def call() -> Any:
        attend[(kv_heads, SPLITS)](
            q, k, v, sums, most, total, tokens, dim**-0.5, D=dim, G=group, S=SPLITS, B=BLOCK, R=ROWS
        )
        merge[(kv_heads, group)](sums, most, total, out, D=dim, G=group, S=SPLITS, R=ROWS)
        return out

    return call
