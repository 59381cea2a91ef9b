"""`autotune bench`: its options, output and documents, with the measuring itself replaced."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lowbit.autotune.bench.case import Case
from lowbit.autotune.bench.outcome import LimitPoint, Outcome, Row
from lowbit.autotune.bench.page import BEGIN, END
from lowbit.autotune.bench.run import FULL, QUICK
from lowbit.autotune.bench.winners import winners
from lowbit.autotune.cli import autotune
from lowbit.autotune.outcome import Silent
from lowbit.costmodel.device import detect
from lowbit.db.records import Winner
from lowbit.db.store import Store
from lowbit.kernels.backend import backend_named
from lowbit.kernels.errors import NoiseError, NoWinnerError
from lowbit.kernels.problem import Problem
from lowbit.search.timing import protocol_here

TIMES = {"lowbit": 20.0, "ik_llama_cpp": 50.0}


class Recorder:
    """Stands in for the bench: keeps what it was asked; ``lowbit`` takes 20 µs, a peer 50, another is not there."""

    def __call__(
        self, cases: Sequence[Case], names: Sequence[str], threads: int, protocol: str, effort: Any,
        candidates: Mapping[Case, str], progress: Any, device: Any,
    ) -> Outcome:  # fmt: skip
        self.cases, self.names, self.threads, self.protocol = list(cases), list(names), threads, protocol
        self.effort, self.candidates = effort, dict(candidates)
        outcome = Outcome(device.as_dict(), threads, protocol, {"torch": "absent: No module named 'torch'"})
        for case in cases:
            for impl, us in TIMES.items():
                outcome.rows.append(
                    Row(case, impl, "ok", storage="int", nbytes=case.nbytes, median_us=us, spread=0.02, samples=9,
                        max_rel_error=0.01, limit_share=0.5, candidate=candidates.get(case, ""))
                )  # fmt: skip
            outcome.rows.append(Row(case, "torch", "absent", "No module named 'torch'"))
            outcome.limits.append(LimitPoint(case, case.nbytes, 10.0, 0.01))
        return outcome


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr("lowbit.autotune.bench.run.bench", recorder)
    monkeypatch.setattr("lowbit.autotune.bench.winners.winners", lambda cases, *rest: dict.fromkeys(cases, "chosen"))
    return recorder


def run(*args: str) -> Any:
    return CliRunner().invoke(autotune, ["bench", *args])


def test_attention_compares_every_format_at_every_length(asked: Recorder, tmp_path: Path) -> None:
    result = run(
        *(
            "attention",
            "--heads",
            "8",
            "--kv-heads",
            "2",
            "--head-dim",
            "64",
            "--tokens",
            "512,64",
            "--kv",
            "int8,fp16",
        ),
        *("--query-rows", "3", "--threads", "1", "--protocol", "warm", "--quick", "--db", str(tmp_path / "t.db")),
    )
    assert result.exit_code == 0, result.output
    problems = [Problem("attend", 8, 2, 64, precision, 3) for precision in ("w8a8", "fp16")]
    assert asked.cases == [Case(problem, tokens) for tokens in (512, 64) for problem in problems]
    assert asked.names == ["lowbit", "ik_llama_cpp", "llama_cpp", "torch", "numpy"]
    assert (asked.threads, asked.protocol, asked.effort) == (1, "warm", QUICK)
    assert set(asked.candidates.values()) == {"chosen"}
    words = " ".join(result.stdout.split())
    for part in ("64 tokens, fp16, 3 rows", "the limit", "2.50×", "50%", "absent", "No module named 'torch'", "Warm:"):
        assert part in words


def test_the_report_is_one_json_object(asked: Recorder, tmp_path: Path) -> None:
    result = run("attention", "--tokens", "128", "--kv", "int4", "--json", "--db", str(tmp_path / "t.db"))
    printed = json.loads(result.stdout)
    assert set(printed) == {"rows", "limit", "peers", "device", "threads", "protocol", "ratios", "rounds"}
    assert [row["impl"] for row in printed["rows"]] == ["lowbit", "ik_llama_cpp", "torch"]
    own = printed["rows"][0]
    assert (own["kv"], own["tokens"], own["median_us"], own["limit_share"]) == ("int4", 128, 20.0, 0.5)
    assert (own["candidate"], own["max_rel_error"]) == ("chosen", 0.01)
    assert printed["ratios"][0]["ratio"] == 2.5
    assert printed["limit"]["cases"][0]["bytes"] == 2 * 8 * 128 * 128 * 18 // 32
    assert asked.effort == FULL


def test_gemv_takes_the_matrices_of_models(asked: Recorder, tmp_path: Path) -> None:
    result = run(
        "gemv", "--model", "smollm2-135m", "--precision", "w4a8", "--vectors", "2", "--db", str(tmp_path / "t")
    )
    assert result.exit_code == 0, result.output
    shapes = {(case.tokens, case.problem.head_dim) for case in asked.cases}
    assert {(576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576)} == shapes
    assert all(case.problem.query_rows == 2 and case.name.startswith("smollm2-135m ") for case in asked.cases)
    assert {"llama_cpp_repack", "llama_cpp_amx"} < set(asked.names)
    run("gemv", "--rows", "96", "--columns", "64", "--precision", "fp16", "--db", str(tmp_path / "t"))
    assert [(case.tokens, case.problem.head_dim) for case in asked.cases] == [(96, 64)]


def test_a_given_candidate_needs_no_database(asked: Recorder, tmp_path: Path) -> None:
    problem = Problem("attend", 32, 8, 128, "w8a8")
    name = backend_named("cpu").baseline(problem, 1).name
    result = run("attention", "--tokens", "64", "--kv", "int8", "--candidate", name, "--impl", "lowbit,numpy")
    assert result.exit_code == 0, result.output
    assert asked.candidates == {Case(problem, 64): name}
    assert asked.names == ["lowbit", "numpy"]


ROWS = "K: T D | int8/bytes/signed"
SCHEDULE = "rows 1, registers 1, block 64, splits 1, prefetch 0, threads 1"


@pytest.mark.parametrize(
    ("kv", "name", "status", "said"),
    [
        ("int8", f"{ROWS}; integer; {SCHEDULE}", 4, "needs other operands than k"),
        ("int4", f"{ROWS}; V: T D | int8/bytes/signed; integer; {SCHEDULE}", 4, "holds int8"),
        ("int8", f"{ROWS} | fold 8; V: T D | int8/bytes/signed; integer; {SCHEDULE}", 4, "folds are for textures"),
        ("int8", f"{ROWS}; V: T D | int8/bytes/signed; integer; {SCHEDULE.replace('64', '64000000')}", 2, "block"),
        ("int8", f"{ROWS} | pad 99999999; V: T D | int8/bytes/signed; integer; {SCHEDULE}", 2, "pad"),
    ],
)
def test_a_candidate_that_cannot_compile_is_refused_before_anything_runs(
    asked: Recorder, kv: str, name: str, status: int, said: str
) -> None:
    result = run("attention", "--tokens", "64", "--kv", kv, "--candidate", name, "--impl", "lowbit")
    assert result.exit_code == status, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert not hasattr(asked, "cases")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("attention", "--kv", "q8_0"), "unknown format 'q8_0'"),
        (("attention", "--tokens", "0"), "tokens must be 1"),
        (("attention", "--kv-heads", "5"), "cannot share"),
        (("attention", "--impl", "lowbit,mkl"), "unknown implementation 'mkl'"),
        (("attention", "--impl", "llama_cpp_amx"), "unknown implementation 'llama_cpp_amx'"),
        (("attention", "--impl", "no_such_module:Peer"), "cannot make 'no_such_module:Peer'"),
        (("attention", "--candidate", "nonsense"), "not a candidate's name"),
        (("gemv", "--rows", "8"), "needs both --rows and --columns"),
        (("gemv", "--model", "smollm2-135m", "--rows", "8", "--columns", "8"), "--model excludes"),
        (("gemv", "--vectors", "17"), "vectors must be 1 to 16, not 17"),
        (("gemv", "--rows", "0", "--columns", "8"), "rows must be 1 to 16777216, not 0"),
        (("gemv", "--rows", "16777216", "--columns", "131072"), "do not fit in memory"),
        (("attention", "--kv", "int8+int8+int8"), "--kv takes one format, or keys' and values'"),
        (("attention", "--query-rows", "17"), "query rows must be 1 to 16, not 17"),
        (("gemv", "--precision", "w8a8+w4a8"), "gemv takes one precision, not w8a8+w4a8"),
    ],
)
def test_bad_options_are_one_line(asked: Recorder, words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert said in line


def test_a_model_that_does_not_exist_is_one_line(asked: Recorder) -> None:
    result = run("gemv", "--model", "gpt-5")
    assert (result.exit_code, len(result.stderr.splitlines())) == (7, 1)


def test_noise_has_its_own_status(monkeypatch: pytest.MonkeyPatch, asked: Recorder) -> None:
    def noisy(*args: Any) -> Outcome:
        raise NoiseError("too busy")

    monkeypatch.setattr("lowbit.autotune.bench.run.bench", noisy)
    result = run("attention", "--impl", "numpy")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (8, "error: too busy")


# -- winners --------------------------------------------------------------------------------------------------------


def winner(problem: Problem, tokens: int, **changes: Any) -> Winner:
    backend, protocol = backend_named("cpu"), protocol_here("cold")
    given = {
        "device": detect().fingerprint, "problem": problem.key, "tokens": tokens, "tokens_from": 1, "tokens_to": None,
        "candidate": backend.baseline(problem, 1).name, "provenance": "verified", "median_us": 5.0,
        "protocol": protocol, "toolchain": backend.toolchain(),
    }  # fmt: skip
    return Winner(**{**given, **changes})


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """Tuning that stores the baseline as winner, and what it was asked for."""
    calls: list[tuple[str, list[int]]] = []

    def tune(problems: Sequence[Problem], tokens: Sequence[int], options: Any, progress: Any) -> None:
        calls.append((problems[0].key, list(tokens)))
        assert (options.strategy, options.quick, options.threads, options.protocol) == ("verify", True, 2, "cold")
        with Store.open(options.db_path) as store:
            store.put_device(detect().fingerprint, detect().as_dict())
            for count in tokens:
                store.put_winner(winner(problems[0], count, tokens_from=count, tokens_to=count))

    monkeypatch.setattr("lowbit.autotune.bench.winners.tune", tune)
    return calls


def chosen(cases: Sequence[Case], path: Path, said: list[str]) -> dict[Case, str]:
    return winners(cases, path, detect(), 2, "cold", Silent(), said.append)


PROBLEM = Problem("attend", 4, 2, 32, "w8a8")


def test_what_is_not_tuned_is_tuned_once(tmp_path: Path, tuned: list[Any]) -> None:
    path, said = tmp_path / "t.db", list[str]()
    cases = [Case(PROBLEM, 64), Case(PROBLEM, 256)]
    found = chosen(cases, path, said)
    assert tuned == [(PROBLEM.key, [64, 256])]
    assert "no measured winner for attend h4/2 d32 q1 w8a8 at 64, 256" in said[0]
    assert found == dict.fromkeys(cases, backend_named("cpu").baseline(PROBLEM, 1).name)
    assert chosen(cases, path, said) == found
    assert len(tuned) == len(said) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"toolchain": "another"},
        {"provenance": "predicted"},
        {"protocol": "warm"},
        {"tokens": 65},
        {"candidate": backend_named("cpu").baseline(PROBLEM, 1).name.replace("threads 1", "threads 3")},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_winner_of_something_else_does_not_count(tmp_path: Path, tuned: list[Any], changes: dict[str, Any]) -> None:
    path = tmp_path / "t.db"
    with Store.open(path) as store:
        store.put_device(detect().fingerprint, detect().as_dict())
        store.put_winner(winner(PROBLEM, changes.pop("tokens", 64), **changes))
    chosen([Case(PROBLEM, 64)], path, [])
    assert tuned == [(PROBLEM.key, [64])]


def test_tuning_that_finds_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.autotune.bench.winners.tune", lambda *args: None)
    with pytest.raises(NoWinnerError, match="not even after tuning"):
        chosen([Case(PROBLEM, 64)], tmp_path / "t.db", [])


# -- the document ---------------------------------------------------------------------------------------------------


@pytest.fixture
def document(asked: Recorder, tmp_path: Path) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    for name, words in (
        ("a", ("attention", "--tokens", "64,2048")),
        ("b", ("gemv", "--rows", "96", "--columns", "64")),
    ):
        (data / f"{name}.json").write_text(run(*words, "--json", "--db", str(tmp_path / "t.db")).stdout)
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n\n{BEGIN}\nold results\n{END}\n\nafter\n")
    return page


def test_stored_reports_become_tables_and_charts(document: Path) -> None:
    data = document.parent / "data"
    result = run("report", "--data", str(data), "--page", str(document))
    assert result.exit_code == 0, result.output
    text = document.read_text(encoding="utf-8")
    assert text.startswith(f"# Before\n\n{BEGIN}\n\n## Decode attention, cold\n")
    assert text.endswith(f"{END}\n\nafter\n")
    assert "old results" not in text
    assert "| 2,048 tokens, int8 | the limit |  | 10 | 1% |" in text
    assert "|  | ik_llama_cpp | int | 50 | 2% |" in text
    assert "2.50×" in text
    assert "## Matrix times vector, cold" in text
    for name in ("a-context", "a-roofline", "b-roofline"):
        assert f"](data/{name}.svg)" in text
        ET.parse(data / f"{name}.svg")
    again = document.read_bytes(), [path.read_bytes() for path in sorted(data.glob("*.svg"))]
    run("report", "--data", str(data), "--page", str(document))
    assert again == (document.read_bytes(), [path.read_bytes() for path in sorted(data.glob("*.svg"))])


def test_the_chart_over_the_context_shows_every_time(document: Path) -> None:
    data = document.parent / "data"
    run("report", "--data", str(data), "--page", str(document))
    root = ET.parse(data / "a-context.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = [each.text for each in root.iter(f"{space}text")]
    assert {"fp16", "int8", "int4", "lowbit", "ik_llama_cpp", "the limit", "2K", "64", "10"} <= set(texts)
    assert len(root.findall(f"{space}circle")) == 3 * 2 * len(TIMES)
    heights = sorted({float(each.attrib["cy"]) for each in root.iter(f"{space}circle")})
    assert len(heights) == 2  # 20 and 50 µs, the longer one higher up


@pytest.mark.parametrize("content", ["{}", "not JSON", "[1]"])
def test_a_file_that_is_no_report_is_named(document: Path, content: str) -> None:
    data = document.parent / "data"
    (data / "c.json").write_text(content)
    before = document.read_bytes()
    result = run("report", "--data", str(data), "--page", str(document))
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "c.json is no report" in line
    assert document.read_bytes() == before


def test_a_page_without_marks_is_left_alone(document: Path) -> None:
    document.write_text("# Mine\n")
    result = run("report", "--data", str(document.parent / "data"), "--page", str(document))
    assert (result.exit_code, document.read_text()) == (1, "# Mine\n")
