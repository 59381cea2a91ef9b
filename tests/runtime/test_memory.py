"""Memory arithmetic against closed forms, a real cache, and made-up containers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit.kernels.errors import FitError, ProblemError
from lowbit.kernels.layout import Layout
from lowbit.runtime.available import available_bytes
from lowbit.runtime.kvcache import KVCache
from lowbit.runtime.memory import (
    CODE_BITS,
    CacheShape,
    DecoderShape,
    check_fits,
    largest_context,
    need,
    shape_of,
    shown_bytes,
)
from lowbit.runtime.segment import KVLayout

HYBRID = DecoderShape("hybrid", (CacheShape(16, 4, 256),), 64)
DENSE = DecoderShape("dense", (CacheShape(46, 8, 128),), 46)


def test_published_examples() -> None:
    assert HYBRID.token_bytes("fp16", "fp16") == 65_536
    assert need(HYBRID, 200_000, "fp16", "fp16").cache == 65_536 * 200_000  # 13.1 GB
    assert shown_bytes(need(HYBRID, 200_000, "fp16", "fp16").cache) == "13.1 GB"
    assert shown_bytes(need(DENSE, 200_000, "fp16", "fp16").cache) == "37.7 GB"


@pytest.mark.parametrize(("format", "bits"), [("fp16", 16), ("int8", 8.5), ("int4", 4.5)])
def test_bits_per_value(format: str, bits: float) -> None:
    found = need(DENSE, 32_000, format, format)
    assert found.cache * 8 == bits * 2 * 46 * 8 * 128 * 32_000
    assert found.scales == (0 if format == "fp16" else found.cache * 0.5 / bits)


def test_keys_and_values_count_each_in_its_format() -> None:
    both = [need(HYBRID, 4096, format, format).cache for format in ("int8", "int4")]
    assert need(HYBRID, 4096, "int8", "int4").cache == sum(both) // 2


def test_a_short_last_group_has_a_scale_of_its_own() -> None:
    shape = DecoderShape("phi", (CacheShape(1, 1, 80),), 1)
    assert need(shape, 32, "int8", "int8").scales == 2 * 32 * 3 * 2


@pytest.mark.parametrize("window", [0, 100, 512, 1000])
@pytest.mark.parametrize("format", CODE_BITS)
def test_a_real_cache_takes_no_more_and_hardly_less(window: int, format: str) -> None:
    packing = {"fp16": "fp16", "int8": "int8/bytes/signed", "int4": "int4/planes/offset"}[format]
    layout = Layout.parse(f"T/16 D/8 t16 d8 | {packing}")
    context = 3000
    cache = KVCache(2, 3, 64, context, KVLayout(layout, layout), window=window)
    most = 0
    while cache.length < context:
        cache.begin(min(100, context - cache.length))
        most = max(most, cache.nbytes)
    predicted = need(DecoderShape("", (CacheShape(2, 3, 64, window),), 2), context, format, format).cache
    assert most <= predicted
    assert most >= 0.75 * predicted


def test_windows_bound_their_layers_alone() -> None:
    shape = DecoderShape("gemma", (CacheShape(13, 4, 256), CacheShape(13, 4, 256, window=4096)), 26)
    full = DecoderShape("", (CacheShape(13, 4, 256),), 26)
    assert need(shape, 1024, "fp16", "fp16").cache == 2 * need(full, 1024, "fp16", "fp16").cache
    short, long = (need(shape, n, "fp16", "fp16").cache for n in (100_000, 200_000))
    assert long - short == need(full, 100_000, "fp16", "fp16").cache


@given(
    st.integers(1, 80),
    st.integers(1, 16),
    st.integers(1, 32).map(lambda n: 8 * n),
    st.integers(0, 5000),
    st.sampled_from(list(CODE_BITS)),
    st.sampled_from(list(CODE_BITS)),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 30),
)
def test_the_largest_context_fits_and_the_next_does_not(
    layers: int, kv_heads: int, head_dim: int, window: int, k: str, v: str, budget: int, weights: int
) -> None:
    shape = DecoderShape("m", (CacheShape(layers, kv_heads, head_dim, window),), layers, 512, 2048, 32000, 8)
    longest = largest_context(shape, budget, k, v, weights)
    if longest is None:
        assert need(shape, 1 << 24, k, v, weights).total <= budget
    else:
        assert longest == 0 or need(shape, longest, k, v, weights).total <= budget
        assert need(shape, longest + 1, k, v, weights).total > budget


def test_a_drafters_ring_buffers() -> None:
    shape = DecoderShape("m", (CacheShape(16, 4, 256),), 64, width=5120)
    assert need(shape, 32, "int8", "int8", draft_layers=5).rings == 4096 * 5 * 5120 * 2
    assert need(shape, 32, "int8", "int8").rings == 0


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    room = 10**9
    check_fits(HYBRID, 15_000, "fp16", "fp16", available=room)
    with pytest.raises(FitError) as caught:
        check_fits(HYBRID, 200_000, "fp16", "fp16", available=room)
    assert str(caught.value) == (
        "a context of 200,000 tokens does not fit in memory: 2 × 16 layers × 4 heads × 256 channels × 200,000 tokens × "
        "2 bytes = 13.1 GB, but 1 GB are available: at most 15,232 tokens fit"
    )
    with pytest.raises(FitError, match=r"× \(1.0625 \+ 0.5625\) bytes = 5.32 GB, but .* not even one token fits"):
        check_fits(HYBRID, 200_000, "int8", "int4", available=1000)
    check_fits(HYBRID, 15_232, "fp16", "fp16", available=room)
    with pytest.raises(FitError):
        check_fits(HYBRID, 15_233, "fp16", "fp16", available=room)


def test_a_models_own_config_is_a_shape() -> None:
    config = SimpleNamespace(
        name="m", layers=30, width=576, heads=9, kv_heads=3, head_dim=64, hidden=1536, vocabulary=49152, window=0
    )
    assert shape_of(config).caches == (CacheShape(30, 3, 64),)
    with pytest.raises(FitError, match="besides, but 100 MB are available"):
        check_fits(config, 1 << 20, "int8", "int8", available=10**8)


def test_bad_questions() -> None:
    with pytest.raises(ProblemError, match="unknown format 'q5'"):
        need(HYBRID, 32, "q5", "fp16")
    for context in (0, -5, (1 << 24) + 1):
        with pytest.raises(ProblemError, match="must be 1 to"):
            need(HYBRID, context, "fp16", "fp16")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (13_107_200_000, "13.1 GB"), (999_900_000, "1,000 MB")],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert shown_bytes(count) == text


# -- containers -------------------------------------------------------------------------------------------------------


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**12))


def test_without_limits_it_is_what_the_system_says(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 10**12
    none = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}
    assert available_bytes(files(tmp_path, none)) == 10**12


def test_a_containers_limit_counts_and_so_do_those_above_it(tmp_path: Path) -> None:
    files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "8000",
            "sys/fs/cgroup/pod/box/memory.current": "3000",
            "sys/fs/cgroup/pod/box/memory.stat": "anon 1\ninactive_file 500\n",
            "sys/fs/cgroup/pod/memory.max": "9000",
            "sys/fs/cgroup/pod/memory.current": "8900",
        },
    )
    assert available_bytes(tmp_path) == 100
    (tmp_path / "sys/fs/cgroup/pod/memory.max").write_text("max")
    assert available_bytes(tmp_path) == 5500


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    files(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/x\n5:memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "1000",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1500",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(0x7FFFFFFFFFFFF000),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "77",
        },
    )
    assert available_bytes(tmp_path) == 0
    (tmp_path / "proc/self/cgroup").write_bytes(b"\xff\xfe nonsense")
    assert available_bytes(tmp_path) == 10**12
