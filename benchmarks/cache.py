"""What storing a token costs, and what memory a cache takes while it grows.

    python benchmarks/cache.py [--layers 30] [--kv-heads 3] [--head-dim 64] [--tokens 8000] [--huge] [--json]

For each format, a cache grows token by token as in decoding: `begin`, then every layer's keys and values. `native` is
the compiled task alone, all layers in one program, and `python` the same through `KVCache.store`: medians. `block`
stores 512 tokens at a time: the mean, first writes to memory included. `first` is the first token, for which memory is
reserved; `p99.9` and `most` are the processor time of the dearest other tokens: all layers together, first writes
included. Memory is what the process gained (RSS) with the first token and with all, and what is reserved. `--huge` asks
for huge pages.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
from lowbit.kernels import append_fields as fields
from lowbit.kernels.cpu.compiled import operator
from lowbit.kernels.cpu.isa import detect
from lowbit.kernels.cpu.pool import pinned, pool
from lowbit.kernels.layout import Layout
from lowbit.runtime import segment
from lowbit.runtime.kvcache import KVCache
from lowbit.runtime.segment import KVLayout

LAYOUTS = {
    "fp16": ("T/16 D t16 | fp16", "T/32 D/16 t32 d16 | fp16"),
    "int8": ("T/16 D/4 t16 d4 | int8/bytes/offset", "T/32 D/16 t32/4 d16 t4 | int8/bytes/signed"),
    "int4": ("T/16 D/8 t16 d8 | int4/lane_interleaved/offset", "T/32 D/16 t32/8 d16 t8 | int4/contiguous/offset"),
    "row-major int8": ("T D | int8/bytes/signed", "T D | int8/bytes/signed"),
}
BLOCK = 512


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Case:
    """One format: a cache to fill, and what fills it."""

    def __init__(self, options: argparse.Namespace, names: tuple[str, str]) -> None:
        self.options = options
        self.layout = KVLayout(*map(Layout.parse, names))
        shape = (options.layers, options.kv_heads, BLOCK, options.head_dim)
        self.k, self.v = np.random.default_rng(1).standard_normal((2, *shape)).astype(np.float32)

    def cache(self) -> KVCache:
        options = self.options
        return KVCache(options.layers, options.kv_heads, options.head_dim, options.tokens, self.layout)

    def native(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of each `begin`, of each program that stores ``count`` tokens, and of the processor for both; bytes
        that the process gained after each."""
        cache, layers = self.cache(), self.options.layers
        cache.jobs[:, fields.SOURCE_K] = [each.ctypes.data for each in self.k]
        cache.jobs[:, fields.SOURCE_V] = [each.ctypes.data for each in self.v]
        cache.jobs[:, fields.SOURCE_HEAD_BYTES], cache.jobs[:, fields.SOURCE_TOKEN_BYTES] = self.k.strides[1:3]
        stages = np.zeros((layers, 4), np.int64)
        stages[:, 0], stages[:, 2], stages[:, 3] = operator("append", detect()), 2 * self.options.kv_heads, 1
        stages[:, 1] = [job.ctypes.data for job in cache.jobs]
        run, before = pool(1).sequence(stages), resident_bytes()
        begun, stored, used, gained = [], [], [], []
        for _ in range(self.options.tokens // count):
            begin_used, start = time.thread_time(), time.perf_counter()
            cache.begin(count)
            middle = time.perf_counter()
            run()
            stored.append(time.perf_counter() - middle)
            begun.append(middle - start)
            used.append(time.thread_time() - begin_used)
            gained.append(resident_bytes() - before)
        return np.array(begun), np.array(stored), np.array(used), np.array(gained)

    def python(self) -> np.ndarray:
        """Seconds of each layer's `store` of one token."""
        cache, k, v = self.cache(), self.k[:, :, :1], self.v[:, :, :1]
        taken = []
        for _ in range(min(self.options.tokens, 2000)):
            cache.begin(1)
            for layer in range(self.options.layers):
                start = time.perf_counter()
                cache.store(layer, k[layer], v[layer])
                taken.append(time.perf_counter() - start)
        return np.array(taken)


def measure(options: argparse.Namespace, names: tuple[str, str]) -> dict[str, float]:
    case = Case(options, names)
    case.native(BLOCK)  # compile, load, wake up
    begun, stored, used, gained = case.native(1)
    _, blocks, _, _ = case.native(BLOCK)
    cache = case.cache()
    cache.begin(options.tokens)
    return {
        "native_us": float(np.median(stored)) / options.layers * 1e6,
        "block_us": float(np.mean(blocks)) / options.layers / BLOCK * 1e6,
        "python_us": float(np.median(case.python())) * 1e6,
        "begin_us": float(np.median(begun)) * 1e6,
        "first_us": float(begun[0] + stored[0]) * 1e6,
        "token_p999_us": float(np.quantile(used[1:], 0.999)) * 1e6,
        "token_most_us": float(used[1:].max()) * 1e6,
        "first_mb": float(gained[0]) / 1e6,
        "all_mb": float(gained[-1]) / 1e6,
        "needed_mb": cache.nbytes / 1e6,
        "reserved_mb": cache.reserved_bytes / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 30), ("kv-heads", 3), ("head-dim", 64), ("tokens", 8000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--huge", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.huge:
        segment.HUGE_FROM_BYTES = 0
    with pinned():
        found = {name: measure(options, names) for name, names in LAYOUTS.items()}
    if options.json:
        print(json.dumps({"options": vars(options), "isa": detect().name, "rows": found}, indent=1))
        return
    print(f"{options.layers} layers of {options.kv_heads} heads of {options.head_dim}, {options.tokens} tokens\n")
    print(f"{'':14} {'µs per layer and token':>29} {'µs per token':>39} {'MB':>39}")
    names = ("native", "block", "python", "begin", "first", "p99.9", "most", "first", "all", "needed", "reserved")
    print(f"{'':14}", *(f"{name:>9}" for name in names))
    for name, row in found.items():
        print(f"{name:14}", *(f"{value:9.{2 if value < 10 else 0}f}" for value in row.values()))


if __name__ == "__main__":
    main()
