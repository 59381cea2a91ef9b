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

counts = st.integers(1, 500)
schedules = st.builds(lambda r, g, b, s, p, t: Schedule(r, g, 32 * b, s, p - 1, t), *[counts] * 6)


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
    ],
    ids=str,
)
def test_impossible_schedules_are_refused(change):
    with pytest.raises(LayoutError, match=next(iter(change))):
        Schedule(**{**Schedule.parse(SCHEDULE).as_dict(), **change})
