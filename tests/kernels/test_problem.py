"""Problems: names, derived sizes, and bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit.kernels.errors import ProblemError
from lowbit.kernels.problem import Problem, check_tokens

problems = st.builds(
    lambda operator, kv_heads, group, octets, precision, rows: Problem(
        operator, kv_heads * group, kv_heads, 8 * octets, precision, rows
    ),
    st.sampled_from(["attend", "qk", "sv"]),
    st.integers(1, 64),
    st.integers(1, 16),
    st.integers(1, 128),
    st.sampled_from(["fp16", "w8a8", "w4a8"]),
    st.integers(1, 16),
)


@given(problems)
def test_a_key_parses_to_the_same_problem(problem):
    assert Problem.parse(problem.key) == problem


@given(problems, problems)
def test_different_problems_have_different_keys(a, b):
    assert (a == b) == (a.key == b.key)


def test_key_is_as_documented():
    problem = Problem("attend", 32, 8, 128, "w8a8")
    assert problem.key == "attend h32/8 d128 q1 w8a8"
    assert problem.with_operator("qk").key == "qk h32/8 d128 q1 w8a8"


@pytest.mark.parametrize(
    ("key", "group", "rows", "format", "bits", "scale_groups"),
    [
        ("attend h32/8 d128 q1 w8a8", 4, 4, "int8", 8, 4),
        ("qk h7/1 d80 q5 w4a8", 7, 35, "int4", 4, 3),
        ("sv h6/6 d96 q16 fp16", 1, 16, "fp16", 16, 0),
        ("sv h6/6 d8 q1 w4a8", 1, 1, "int4", 4, 1),
    ],
)
def test_derived_sizes(key, group, rows, format, bits, scale_groups):
    problem = Problem.parse(key)
    assert (problem.group, problem.rows, problem.scale_groups("k")) == (group, rows, scale_groups)
    assert (problem.stored("k").format, problem.stored("k").bits) == (format, bits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operator": "mul"}, "unknown operator 'mul': choose one of attend, qk, sv"),
        ({"precision": "w2a8"}, "unknown precision 'w2a8'"),
        ({"heads": 0}, "at least 1, not 0 and 4"),
        ({"kv_heads": 0}, "at least 1, not 8 and 0"),
        ({"heads": 6}, "6 query heads cannot share 4 key/value heads evenly"),
        ({"heads": 2}, "2 query heads cannot share 4"),
        ({"head_dim": 0}, "multiple of 8 from 8 to 1024, not 0"),
        ({"head_dim": 7}, "not 7"),
        ({"head_dim": -8}, "not -8"),
        ({"head_dim": 1032}, "not 1032"),
        ({"query_rows": 0}, "query rows must be 1 to 16, not 0"),
        ({"query_rows": 17}, "not 17"),
    ],
)
def test_impossible_problems_are_refused(change, message):
    fields = {"operator": "attend", "heads": 8, "kv_heads": 4, "head_dim": 64, "precision": "w8a8", "query_rows": 1}
    Problem(**fields)
    with pytest.raises(ProblemError, match=message) as caught:
        Problem(**{**fields, **change})
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    "key",
    [
        "",
        "attend",
        "attend h32/8 d128 q1",
        "attend h32/8 d128 q1 w8a8 ",
        "attend h32 d128 q1 w8a8",
        "attend h32/8 d-128 q1 w8a8",
        "attend h32/8 d128 q1 w8a8\n",
        "attend h32/8 d7 q1 w8a8",
        "attend h32/0 d64 q1 w8a8",
    ],
)
def test_other_keys_are_refused(key):
    with pytest.raises(ProblemError):
        Problem.parse(key)


def test_token_counts():
    assert [check_tokens(n) for n in (1, 4096, 1 << 24)] == [1, 4096, 1 << 24]
    for bad in (0, -1, (1 << 24) + 1):
        with pytest.raises(ProblemError, match=f"not {bad}"):
            check_tokens(bad)


@pytest.mark.parametrize(
    "problem",
    [
        Problem("attend", 32, 8, 128, "w8a8+w4a8"),
        Problem("attend", 32, 8, 128, "fp16", window=4096, softcap=50.0),
        Problem("attend", 8, 4, 256, "w4a8", query_rows=8, softcap=0.1),
        Problem("gemv", 1, 1, 8192, "w4a8", query_rows=16),
    ],
)
def test_a_key_names_formats_windows_caps_and_matrices(problem: Problem) -> None:
    assert Problem.parse(problem.key) == problem


def test_equal_precisions_are_one() -> None:
    assert Problem("attend", 8, 4, 64, "w8a8+w8a8") == Problem("attend", 8, 4, 64, "w8a8")


def test_formats_are_the_roles_own() -> None:
    problem = Problem("attend", 8, 4, 64, "fp16+w4a8")
    assert (problem.stored("k").format, problem.stored("v").format) == ("fp16", "int4")
    assert (problem.scale_groups("k"), problem.scale_groups("v")) == (0, 2)
    assert [problem.integer(role, "integer") for role in "kv"] == [False, True]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("qk", 8, 4, 64, "w8a8+w4a8"), "one"),
        (("attend", 8, 4, 64, "w8a8+w4a8+fp16"), "one or two"),
        (("gemv", 2, 1, 64, "w8a8"), "no heads"),
        (("qk", 8, 4, 64, "w8a8", 1, 128), "softmax"),
        (("attend", 8, 4, 64, "w8a8", 1, -1), "window"),
        (("attend", 8, 4, 64, "w8a8", 1, 0, float("nan")), "softcap"),
        (("attend", 8.0, 4, 64, "w8a8"), "whole number"),
    ],
)
def test_impossible_combinations_are_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        Problem(*arguments)  # type: ignore[arg-type]
