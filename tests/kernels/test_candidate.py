"""Candidates and schedules: names, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.errors import LayoutError
from lowbit.kernels.layout import Layout
from random_layouts import layouts

SCHEDULE = "rows 4, registers 2, block 128, splits 3, prefetch 8, threads 2"
LAYOUT = "T D | int8/bytes/signed"

schedules = st.builds(
    lambda r, g, b, s, p, t: Schedule(r, g, 32 * b, s, p, t),
    *(st.integers(1, 64),) * 2,
    st.integers(1, 1 << 15),
    st.integers(1, 1 << 16),
    st.integers(0, 4096),
    st.integers(1, 256),
)


@st.composite
def candidates(draw):
    roles = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    k, v = (draw(layouts()) if present else None for present in roles)
    return Candidate(k, v, draw(st.sampled_from(["integer", "float"])), draw(schedules))


@given(candidates())
def test_a_name_parses_to_the_same_candidate(candidate):
    assert Candidate.parse(candidate.name) == candidate
    assert str(candidate) == candidate.name


@given(candidates(), candidates())
def test_different_candidates_have_different_names(a, b):
    assert (a == b) == (a.name == b.name)


def test_names_are_as_documented():
    schedule = Schedule.parse(SCHEDULE)
    assert schedule == Schedule(rows=4, registers=2, block=128, splits=3, prefetch=8, threads=2)
    assert schedule.name == SCHEDULE
    assert schedule.as_dict() == {"rows": 4, "registers": 2, "block": 128, "splits": 3, "prefetch": 8, "threads": 2}
    both = Candidate(Layout.parse(LAYOUT), Layout.parse("D T | fp16"), "float", schedule)
    assert both.layout == f"K: {LAYOUT}; V: D T | fp16"
    assert both.name == f"K: {LAYOUT}; V: D T | fp16; float; {SCHEDULE}"
    assert Candidate(None, Layout.parse(LAYOUT), "integer", schedule).name == f"V: {LAYOUT}; integer; {SCHEDULE}"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "integer",
        f"integer; {SCHEDULE}",
        f"K: {LAYOUT}; {SCHEDULE}",
        f"K: {LAYOUT}; integer",
        f"K: {LAYOUT}; mixed; {SCHEDULE}",
        f"Q: {LAYOUT}; integer; {SCHEDULE}",
        f"{LAYOUT}; integer; {SCHEDULE}",
        f"K: {LAYOUT}; K: {LAYOUT}; integer; {SCHEDULE}",
        f"K: T; integer; {SCHEDULE}",
        f"K: {LAYOUT}; integer; {SCHEDULE} ",
        f"K: {LAYOUT}; integer; rows 4, registers 2",
        f"K: {LAYOUT}; integer; {SCHEDULE}".replace("rows 4", "rows -4"),
    ],
)
def test_malformed_names_are_refused(name):
    with pytest.raises(LayoutError):
        Candidate.parse(name)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 0},
        {"registers": 0},
        {"block": 0},
        {"block": 48},
        {"splits": 0},
        {"prefetch": -1},
        {"threads": 0},
        {"rows": 65},
        {"registers": 65},
        {"block": (1 << 20) + 32},
        {"splits": (1 << 16) + 1},
        {"prefetch": 4097},
        {"threads": 257},
    ],
    ids=str,
)
def test_impossible_schedules_are_refused(change):
    with pytest.raises(LayoutError, match=next(iter(change))):
        Schedule(**{**Schedule.parse(SCHEDULE).as_dict(), **change})


@pytest.mark.parametrize("digits", [12, 5000])
def test_a_name_cannot_ask_for_a_huge_number(digits):
    huge = "9" * digits
    for name in (
        f"K: {LAYOUT}; integer; {SCHEDULE.replace('128', huge)}",
        f"K: {LAYOUT} | pad {huge}; integer; {SCHEDULE}",
        f"K: {LAYOUT} | fold {huge}; integer; {SCHEDULE}",
        f"K: T/{huge} D | int8/bytes/signed; integer; {SCHEDULE}",
    ):
        with pytest.raises(LayoutError) as caught:
            Candidate.parse(name)
        assert "\n" not in str(caught.value)
