from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lowbit.costmodel.traffic import call_bytes, operand_bytes, scale_bytes, visible_tokens, walked_tokens
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.errors import LayoutError, ProblemError
from lowbit.kernels.layout import Layout
from lowbit.kernels.packing import packings
from lowbit.kernels.problem import Problem

PACKINGS = [p.name for format in ("fp16", "int8", "int4") for p in packings(format)]
SCHEDULE = Schedule(rows=4, registers=1, block=32, splits=1, prefetch=0, threads=1)


def enumerated_lines(layout: Layout, tokens: int, capacity: int, channels: int, line_bytes: int, heads: int = 1) -> int:
    """Touched lines by asking the layout for the address of every element read."""
    read = -(-tokens // 32) * 32
    byte, _ = layout.address(np.arange(read)[:, None], np.arange(channels)[None, :], capacity, channels)
    width = max(1, layout.packing.bits // 8)
    lines = [
        (head * layout.head_bytes(capacity, channels) + byte + part) // line_bytes
        for head in range(heads)
        for part in range(width)
    ]
    return len(np.unique(np.concatenate([x.ravel() for x in lines])))


def enumerated_scale_lines(tokens: int, capacity: int, channels: int, line_bytes: int, heads: int = 1) -> int:
    groups = -(-channels // 32)
    head_bytes = -(-2 * capacity * groups // 64) * 64
    touched = set()
    for head in range(heads):
        for t in range(-(-tokens // 32) * 32):
            for g in range(groups):
                byte = head * head_bytes + 2 * ((t // 32) * groups * 32 + g * 32 + t % 32)
                touched |= {byte // line_bytes, (byte + 1) // line_bytes}
    return len(touched)


def chains(axis: str, units: list[tuple[int, ...]]) -> st.SearchStrategy[list[str]]:
    """An axis's factors: ``(16, 4)`` are blocks of 16 in quads, `T/16 t16/4 t4`."""

    def names(blocks: tuple[int, ...]) -> list[str]:
        inner = [f"{axis.lower()}{b}/{u}" for b, u in zip(blocks, (*blocks[1:], 1), strict=True)]
        return [f"{axis}/{blocks[0]}", *inner]

    return st.sampled_from(units).map(lambda blocks: names(blocks) if blocks else [axis])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    token = draw(chains("T", [(), (2,), (8,), (16,), (32,), (64,), (32, 4), (64, 16, 2)]))
    channel = draw(chains("D", [(), (2,), (4,), (8,), (32,), (48,), (64,), (16, 4), (64, 32, 8)]))
    order = draw(st.permutations(token + channel))
    pad = draw(st.sampled_from([0, 0, 4, 36, 64, 128]))
    fold = draw(st.sampled_from([0, 0, 1, 3, 7, 16, 100]))
    text = f"{' '.join(order)} | {draw(st.sampled_from(PACKINGS))}"
    return Layout.parse(text + (f" | pad {pad}" if pad else "") + (f" | fold {fold}" if fold else ""))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    layout=layouts(),
    tokens=st.integers(1, 200),
    spare=st.sampled_from([0, 32, 64, 96, 320]),
    channels=st.sampled_from([8, 16, 40, 64, 72, 80, 96, 128]),
    line_bytes=st.sampled_from([64, 128]),
)
def test_operand_bytes_equal_an_enumeration_of_every_element(
    layout: Layout, tokens: int, spare: int, channels: int, line_bytes: int
) -> None:
    capacity = -(-tokens // 32) * 32 + spare
    try:
        layout.pitch_bytes(capacity, channels)
    except LayoutError:
        assume(False)
    expected = enumerated_lines(layout, tokens, capacity, channels, line_bytes) * line_bytes
    assert operand_bytes(layout, tokens, capacity, channels, line_bytes) == expected


@pytest.mark.parametrize(
    ("name", "tokens", "capacity", "expected"),
    [
        ("T D | int8/bytes/signed", 32, 1024, 32 * 128),  # a prefix of rows
        ("T D | int8/bytes/signed | pad 64", 32, 1024, 32 * 128),  # padding is skipped
        ("T D | int8/bytes/signed | pad 32", 32, 1024, 32 * 128 + 16 * 64),  # every other row straddles a third line
        ("D T | int8/bytes/signed", 32, 1024, 128 * 64),  # 32 bytes of a line in each of 128 rows
        ("D/4 T d4 | int8/bytes/signed", 32, 1024, 32 * 128),
        ("T/16 D/4 t16 d4 | int4/planes/offset", 32, 1024, 32 * 64),
        ("T D | fp16", 33, 64, 64 * 256),  # whole blocks of 32 tokens
        ("T D | int8/bytes/signed | fold 16", 32, 64, 32 * 128),  # four panels, two of them read
    ],
)
def test_operand_bytes_of_known_layouts(name: str, tokens: int, capacity: int, expected: int) -> None:
    assert operand_bytes(Layout.parse(name), tokens, capacity, 128, 64) == expected


def test_a_long_context_costs_no_more_to_count_than_a_short_one() -> None:
    tokens = 1 << 24
    layout = Layout.parse("D/4 T d4 | int4/planes/signed | pad 20")
    # Each of the 32 rows is 2 bytes a token; 20 bytes of padding move it against the lines.
    row = 2 * tokens
    lines = {(r * (row + 20) // 64, (r * (row + 20) + row - 1) // 64) for r in range(32)}
    expected = sum(last - first + 1 for first, last in lines) - sum(
        (r * (row + 20) + row - 1) // 64 == (r + 1) * (row + 20) // 64 for r in range(31)
    )
    assert operand_bytes(layout, tokens, tokens, 128, 64) == 64 * expected


def test_more_tokens_than_the_storage_holds_are_refused() -> None:
    with pytest.raises(LayoutError, match="capacity"):
        operand_bytes(Layout.parse("T D | fp16"), 65, 64, 64, 64)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 300),
    spare=st.sampled_from([0, 32, 96]),
    channels=st.sampled_from([8, 32, 40, 96, 128]),
    line_bytes=st.sampled_from([64, 128]),
    heads=st.integers(1, 4),
)
def test_scale_bytes_equal_an_enumeration(tokens: int, spare: int, channels: int, line_bytes: int, heads: int) -> None:
    capacity = -(-tokens // 32) * 32 + spare
    expected = enumerated_scale_lines(tokens, capacity, channels, line_bytes, heads) * line_bytes
    assert scale_bytes(tokens, channels, line_bytes, heads, capacity) == expected


@pytest.mark.parametrize("line_bytes", [64, 128])
@pytest.mark.parametrize("precision", ["fp16", "w8a8", "w4a8"])
@pytest.mark.parametrize("operator", ["attend", "qk", "sv"])
def test_call_bytes_add_up_all_heads_operands_and_scales(operator: str, precision: str, line_bytes: int) -> None:
    problem = Problem(operator, heads=6, kv_heads=3, head_dim=80, precision=precision)
    packing = packings(problem.stored("k").format)[0].name
    k = Layout.parse(f"T D/8 d8 | {packing} | pad 24")
    v = Layout.parse(f"D/16 T d16 | {packing}")
    roles = {"attend": [k, v], "qk": [k], "sv": [v]}[operator]
    candidate = Candidate(k if k in roles else None, v if v in roles else None, "integer", SCHEDULE)
    expected = sum(enumerated_lines(layout, 70, 96, 80, line_bytes, heads=3) for layout in roles)
    if precision != "fp16":
        expected += len(roles) * enumerated_scale_lines(70, 96, 80, line_bytes, heads=3)
    assert call_bytes(problem, candidate, 70, line_bytes) == expected * line_bytes


def test_a_channel_block_that_the_head_does_not_fill_is_read_whole() -> None:
    problem = Problem("qk", heads=1, kv_heads=1, head_dim=80, precision="fp16")
    candidate = Candidate(Layout.parse("D/64 T d64 | fp16"), None, "float", SCHEDULE)
    assert call_bytes(problem, candidate, 32, 64) == 2 * 32 * 128


def test_call_bytes_refuse_what_has_no_answer() -> None:
    problem = Problem("attend", heads=1, kv_heads=1, head_dim=64, precision="fp16")
    layout = Layout.parse("T D | fp16")
    with pytest.raises(LayoutError, match="no layout for operand 'v'"):
        call_bytes(problem, Candidate(layout, None, "float", SCHEDULE), 32, 64)
    with pytest.raises(ProblemError, match="tokens"):
        call_bytes(problem, Candidate(layout, layout, "float", SCHEDULE), 0, 64)


@pytest.mark.parametrize(
    "name", ["T D | int8/bytes/signed", "T/16 D/4 t16 d4 | int4/planes/offset", "T/32 D t32 | fp16"]
)
@pytest.mark.parametrize(("tokens", "window", "rows"), [(200, 64, 1), (200, 65, 1), (257, 32, 4), (90, 500, 2)])
def test_bytes_of_a_window_are_those_of_its_tokens(name: str, tokens: int, window: int, rows: int) -> None:
    layout = Layout.parse(name)
    precision = {"fp16": "fp16", "int8": "w8a8", "int4": "w4a8"}[layout.packing.format]
    problem = Problem("attend", 4, 2, 64, precision, rows, window)
    # Query position i of n sees tokens up to tokens − n + i, and its window ends there.
    seen = [t for i in range(rows) for t in range(tokens - rows + i + 1) if t > tokens - rows + i - window]
    first, capacity = min(seen) // 32 * 32, -(-tokens // 32) * 32
    assert walked_tokens(problem, tokens) == capacity - first
    assert visible_tokens(problem, tokens) == max(sum(t > q - window for t in range(q + 1)) for q in (tokens - 1,))
    byte, _ = layout.address(np.arange(first, capacity)[:, None], np.arange(64)[None, :], capacity, 64)
    stride, width = layout.head_bytes(capacity, 64), max(1, layout.packing.bits // 8)
    words = {(head * stride + each + part) // 64 for head in range(2) for each in byte.ravel() for part in range(width)}
    scales = set()
    if layout.packing.format != "fp16":
        head_bytes = -(-2 * capacity * 2 // 64) * 64
        blocks = range(first // 32, capacity // 32)
        scales = {
            (head * head_bytes + 128 * block + b) // 64 for head in range(2) for block in blocks for b in range(128)
        }
    expected = 2 * 64 * (len(words) + len(scales))
    assert call_bytes(problem, Candidate(layout, layout, "integer", SCHEDULE), tokens, 64) == expected


def test_bytes_of_a_matrix_are_its_rows() -> None:
    layout = Layout.parse("T/16 D/4 t16 d4 | int8/bytes/signed")
    problem = Problem("gemv", 1, 1, 576, "w8a8")
    candidate = Candidate(layout, None, "integer", SCHEDULE)
    assert call_bytes(problem, candidate, 192, 64) == 192 * (576 + 2 * 18)
