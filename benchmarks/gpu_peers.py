"""Attention of others on the same GPU, timed in the same way: PyTorch's, and a split kernel in Triton. fp16 throughout.

`lowbit`'s problem is ``attend h32/8 d128 q1 fp16``: one query position, grouped heads. Each sample is one replay of a
CUDA graph behind a flush of the second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

SAMPLES = 20
COVER_CYCLES = 300_000
TOLERANCE = 5e-3


def compare(heads: int, kv_heads: int, head_dim: int, lengths: Sequence[int]) -> dict[str, Any]:
    """Microseconds of each peer at each length, and what is missing.

    Returns
    -------
    dict
        ``us``: by name; ``notes``: in words.
    """
    notes: list[str] = []
    if find_spec("torch") is None:
        return {"us": {}, "notes": ["PyTorch is not installed"]}
    import torch

    if not torch.cuda.is_available():
        return {"us": {}, "notes": [f"PyTorch {torch.__version__} finds no GPU"]}
    contestants = {"torch sdpa": sdpa}
    if find_spec("triton") is None:
        notes.append("Triton is not installed")
    else:
        from gpu_triton import split

        contestants["triton split"] = split
    us = {}
    for tokens in lengths:
        q, k, v = operands(heads, kv_heads, head_dim, tokens, "cuda")
        expected = exact(q, k, v)
        for name, make in contestants.items():
            title = f"{name} h{heads}/{kv_heads} d{head_dim} fp16 at {tokens}"
            call = make(q, k, v)
            error = float((call().double() - expected).norm() / expected.norm())
            if error > TOLERANCE:
                notes.append(f"{title}: relative error {error:.1e}")
                continue
            us[title] = timed_us(call)
    return {"us": us, "notes": notes, "torch": torch.__version__}


def operands(heads: int, kv_heads: int, head_dim: int, tokens: int, device: str) -> tuple[Any, Any, Any]:
    """Queries (1, heads, 1, head_dim), keys and values (1, kv_heads, tokens, head_dim)."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(device, torch.float16)

    return (
        made(1, heads, 1, head_dim),
        made(1, kv_heads, tokens, head_dim),
        made(1, kv_heads, tokens, head_dim),
    )


def exact(q: Any, k: Any, v: Any) -> Any:
    """The same in float64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return ((q @ k.transpose(2, 3)) / q.shape[3] ** 0.5).softmax(3) @ v


def sdpa(q: Any, k: Any, v: Any) -> Callable[[], Any]:
    from torch.nn.functional import scaled_dot_product_attention

    return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)


def timed_us(call: Callable[[], Any]) -> float:
    """Median of `SAMPLES` replays of a graph of one call, each with cold operands."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.zeros(max(2 * torch.cuda.get_device_properties(0).L2_cache_size, 32 << 20) // 4, device="cuda")
    samples = []
    for _ in range(SAMPLES):
        flush.sum()
        torch.cuda._sleep(COVER_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3)
    return sorted(samples)[SAMPLES // 2]
