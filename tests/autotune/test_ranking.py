"""Which layout suits all lengths of a problem."""

from __future__ import annotations

import math

import pytest
from lowbit.autotune.ranking import Ranked, steadiest
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.layout import Layout
from lowbit.kernels.problem import Problem

PROBLEM = Problem("attend", 8, 2, 64, "fp16")
A, B, C = "T D | fp16", "T/16 D/4 t16 d4 | fp16", "T D | fp16 | pad 64"


def candidate(layout: str, rows: int = 1) -> Candidate:
    parsed = Layout.parse(layout)
    return Candidate(parsed, parsed, "float", Schedule(rows, 1, 32, 1, 0, 1))


def ranked(**predicted_us: float) -> Ranked:
    """Predictions of layouts ``A`` to ``C``; ``A2`` is another schedule of A."""
    layouts = {"A": A, "B": B, "C": C}
    made = {name: candidate(layouts[name[0]], len(name)) for name in predicted_us}
    times = {made[name].name: time_us for name, time_us in predicted_us.items()}
    return Ranked(PROBLEM, 64, {each.name: each for each in made.values()}, times, {})


def test_slowdowns_are_those_of_each_layouts_best_candidate() -> None:
    found = ranked(A=3.0, A2=2.0, B=2.5, C=math.inf).slowdowns
    assert found == {candidate(A).layout: 1.0, candidate(B).layout: pytest.approx(1.25)}


def test_the_steadiest_layout_costs_least_where_it_costs_most() -> None:
    # A is the best twice, but 50 % slower once; B is never the best and never more than 2 % slower.
    lengths = [ranked(A=1.0, B=1.02, C=9.0), ranked(A=1.0, B=1.01, C=9.0), ranked(A=1.5, B=1.02, C=1.0)]
    assert steadiest(lengths) == candidate(B).layout
    assert steadiest(lengths[:1]) == candidate(A).layout


def test_without_predictions_at_every_length_no_layout_is_steady() -> None:
    assert steadiest([ranked(A=1.0, B=math.inf), ranked(A=math.inf, B=1.0)]) == ""
    assert steadiest([]) == ""
