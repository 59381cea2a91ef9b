"""The main job's options, output and ends, with the tuning itself replaced."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from lowbit.autotune.cli import autotune
from lowbit.autotune.outcome import Decision, Options, Progress, TuneInterrupted, TuneReport
from lowbit.db.records import Measurement
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.errors import NoiseError
from lowbit.kernels.layout import Layout
from lowbit.kernels.problem import Problem
from lowbit.search.strategy import Choice

LAYOUT = "T/16 D/4 t16 d4 | int8/bytes/offset"
CHOSEN = Candidate(Layout.parse(LAYOUT), Layout.parse(LAYOUT), "integer", Schedule(4, 2, 64, 1, 0, 1))


def measurement(problem: Problem, tokens: int, median_us: float) -> Measurement:
    return Measurement(
        device="silicon", problem=problem.key, tokens=tokens, candidate=CHOSEN.name, protocol="cold", status="ok",
        median_us=median_us, spread=0.01, samples=9, toolchain="compiler 1",
    )  # fmt: skip


class Recorder:
    """Stands in for `tune`: keeps what it was asked and reports a winner of 25 µs against a baseline of 100 µs."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.tokens: dict[Problem, Sequence[int]] = {}
        self.options = Options(Path())

    def __call__(
        self, problems: Sequence[Problem], tokens: Mapping[Problem, Sequence[int]], options: Options, progress: Progress
    ) -> TuneReport:
        self.problems, self.tokens, self.options = list(problems), dict(tokens), options
        progress.update("measuring", 1, 1, "all of it")
        report = TuneReport({"fingerprint": "silicon"}, options.db_path)
        report.candidates = 300
        report.reasons["too wide"] = 20
        for problem in problems:
            for count in tokens[problem]:
                timed, slow = (measurement(problem, count, time_us) for time_us in (25.0, 100.0))
                choice = Choice(CHOSEN, "verified", 24.0, timed, ("another",), slow)
                report.decisions.append(Decision(problem.key, count, choice, 0.5))
        return report


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr("lowbit.autotune.tune.tune", recorder)
    return recorder


def run(*args: str) -> Any:
    return CliRunner().invoke(autotune, args)


def test_each_option_reaches_the_job(tuned: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    result = run(
        *("--device", "cpu", "--heads", "8", "--kv-heads", "2", "--head-dim", "128", "--query-rows", "4"),
        *("--operator", "qk", "--precision", "w4a8, fp16,w4a8", "--tokens", "128,64,128", "--strategy", "optuna"),
        *("--top-k", "5", "--trials", "17", "--budget", "2.5", "--threads", "2", "--protocol", "warm"),
        *("--db", str(path), "--quick", "--plugin", "json", "--plugin", "csv", "--json"),
    )
    assert result.exit_code == 0, result.output
    assert tuned.problems == [Problem("qk", 8, 2, 128, "w4a8", 4), Problem("qk", 8, 2, 128, "fp16", 4)]
    assert list(tuned.tokens.values()) == [(128, 64)] * 2
    assert tuned.options == Options(
        db_path=path, device="cpu", strategy="optuna", top_k=5, trials=17, budget_s=2.5, threads=2, quick=True,
        plugins=("json", "csv"), protocol="warm", asked="--operator qk --heads 8 --kv-heads 2 --head-dim 128 "
        "--query-rows 4 --precision w4a8,fp16 --tokens 128,64",
    )  # fmt: skip


def test_defaults_are_those_of_the_job(tuned: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    assert run("--db", str(path)).exit_code == 0
    assert tuned.options == Options(db_path=path, asked="--model llama-3.2-1b --precision fp16,w8a8,w4a8")
    assert set(tuned.tokens.values()) == {(128, 512, 2048, 8192, 32768)}
    assert {(p.operator, p.heads, p.kv_heads, p.head_dim, p.query_rows) for p in tuned.problems} == {
        ("attend", 32, 8, 64, 1)
    }
    assert [p.precision for p in tuned.problems] == ["fp16", "w8a8", "w4a8"]


def test_options_of_attention_reach_the_problem(tuned: Recorder, tmp_path: Path) -> None:
    common = ("--tokens", "64", "--db", str(tmp_path / "t.db"))
    result = run(
        "--model", "gemma-2-2b", "--precision", "w8a8+w4a8,fp16", "--window", "4096", "--softcap", "50", *common
    )
    assert result.exit_code == 0, result.output
    assert [problem.key for problem in tuned.problems] == [
        "attend h8/4 d256 q1 w8a8+w4a8 window 4096 softcap 50", "attend h8/4 d256 q1 fp16 window 4096 softcap 50",
    ]  # fmt: skip
    assert "--window 4096 --softcap 50 --precision w8a8+w4a8,fp16" in tuned.options.asked


def test_weights_of_a_model_are_matrices_of_each_shape(tuned: Recorder, tmp_path: Path) -> None:
    common = ("--operator", "gemv", "--db", str(tmp_path / "t.db"))
    result = run("--model", "llama-3.2-1b", "--precision", "w4a8,w8a8", *common)
    assert result.exit_code == 0, result.output
    shapes = {(2048, 2048), (512, 2048), (8192, 2048), (2048, 8192), (128256, 2048)}
    for precision in ("w4a8", "w8a8"):
        mine = {p: rows for p, rows in tuned.tokens.items() if p.precision == precision}
        assert {(row, p.head_dim) for p, rows in mine.items() for row in rows} == shapes
    assert {(p.operator, p.heads, p.kv_heads, p.query_rows) for p in tuned.problems} == {("gemv", 1, 1, 1)}
    assert "128256 rows" in result.stdout


def test_one_matrix_and_several_vectors(tuned: Recorder, tmp_path: Path) -> None:
    common = ("--operator", "gemv", "--precision", "w8a8", "--db", str(tmp_path / "t.db"))
    result = run("--rows", "100", "--columns", "40", "--vectors", "16", *common)
    assert result.exit_code == 0, result.output
    assert tuned.tokens == {Problem("gemv", 1, 1, 40, "w8a8", 16): (100,)}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--operator", "gemv", "--tokens", "64"), "--tokens is for attention"),
        (("--operator", "gemv", "--rows", "64"), "both --rows and --columns"),
        (("--operator", "gemv", "--rows", "0", "--columns", "64"), "rows must be 1 to"),
        (("--operator", "gemv", "--rows", "64", "--columns", "63"), "columns must be a multiple of 8"),
        (("--operator", "gemv", "--rows", "64", "--columns", "64", "--vectors", "17"), "vectors must be 1 to 16"),
        (("--operator", "gemv", "--rows", "64", "--columns", "64", "--model", "phi-2"), "--model excludes --rows"),
        (("--operator", "gemv", "--heads", "8"), "--heads is for attention"),
        (("--operator", "gemv", "--query-rows", "2"), "gemv takes --vectors"),
        (("--operator", "gemv", "--window", "2"), "--window is for attention"),
        (("--operator", "gemv", "--precision", "w8a8+w4a8"), "gemv takes one precision, not w8a8+w4a8"),
        (("--operator", "qk", "--window", "64"), "window and softcap are for attend"),
        (("--operator", "qk", "--precision", "w8a8+w4a8"), "qk takes one precision, not w8a8+w4a8"),
        (("--rows", "64"), "--rows is for --operator gemv"),
        (("--vectors", "1"), "--vectors is for --operator gemv"),
        (("--window", "-1"), "cannot be -1"),
        (("--softcap", "nan"), "cannot be 0 and nan"),
        (("--precision", "w8a8+w4a8+fp16"), "one or two precisions"),
        (("--tokens", "100.5"), "'100.5' is not a whole number"),
    ],
)
def test_contradictions_are_refused(tuned: Recorder, arguments: tuple[str, ...], complaint: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.stderr.split())
    assert not tuned.problems


def test_a_preset_and_heads_give_the_same_problem(tuned: Recorder, tmp_path: Path) -> None:
    common = ("--precision", "w8a8", "--db", str(tmp_path / "t.db"))
    run("--model", "Phi-2", *common)
    by_name = tuned.problems
    run("--heads", "32", "--head-dim", "80", *common)
    assert by_name == tuned.problems == [Problem("attend", 32, 32, 80, "w8a8")]


def test_each_geometry_of_a_model_file_is_a_problem(tuned: Recorder, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "mixed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_embedding_length(256)
    writer.add_head_count(8)
    writer.add_head_count_kv([2, 2, 4])
    writer.add_tensor("t", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    result = run("--model", str(path), "--precision", "w8a8", "--db", str(tmp_path / "t.db"))
    assert result.exit_code == 0, result.output
    assert tuned.problems == [Problem("attend", 8, 2, 32, "w8a8"), Problem("attend", 8, 4, 32, "w8a8")]


def test_json_is_one_object_and_progress_goes_to_stderr(tuned: Recorder, tmp_path: Path) -> None:
    result = run("--model", "smollm2-135m", "--tokens", "64", "--db", str(tmp_path / "t.db"), "--json")
    printed = json.loads(result.stdout)
    assert {"problems", "space", "select_ms", "db"} <= set(printed)
    assert printed["space"] == {"candidates": 300, "pruned": 20, "reasons": {"too wide": 20}, "unpredicted": {}}
    entry = printed["problems"][0]
    assert entry["winner"] == {"layout": CHOSEN.layout, "pipeline": "integer", "schedule": CHOSEN.schedule.as_dict()}
    assert (entry["predicted_us"], entry["median_us"], entry["speedup"]) == (24.0, 25.0, 4.0)
    assert "measuring: 1/1  all of it" in result.stderr


def test_numbers_that_json_lacks_become_null(monkeypatch: pytest.MonkeyPatch, tuned: Recorder, tmp_path: Path) -> None:
    def endless(*args: Any) -> TuneReport:
        report = tuned(*args)
        report.select_ms = float("inf")
        return report

    monkeypatch.setattr("lowbit.autotune.tune.tune", endless)
    result = run("--tokens", "64", "--db", str(tmp_path / "t.db"), "--json")
    assert json.loads(result.stdout)["select_ms"] is None


def test_the_closing_table(tuned: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    result = run("--model", "smollm2-135m", "--precision", "w8a8", "--tokens", "64,512", "--db", str(path))
    shown = " ".join(result.stdout.split())
    for words in ("h9/3 d64", "512", "int8/bytes/offset", "24", "25", "4.00×", "50%", "300 candidates", "20 more"):
        assert words in shown
    assert path.name in shown


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize(
    ("status", "noisy", "exit_status"),
    [("wrong", False, 1), ("crashed", False, 1), ("wrong", True, 0), ("ok", False, 0)],
)
def test_winners_that_nobody_checked_because_all_was_wrong_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, as_json: list[str], status: str, noisy: bool, exit_status: int
) -> None:
    def faulty(
        problems: Sequence[Problem], tokens: Mapping[Problem, Sequence[int]], options: Options, progress: Progress
    ) -> TuneReport:
        report = TuneReport({"fingerprint": "silicon"}, options.db_path)
        for problem in problems:
            for count in tokens[problem]:
                measured = replace(measurement(problem, count, 25.0), status=status)
                report.measurements[problem.key, count, measured.candidate] = measured
                report.decisions.append(Decision(problem.key, count, Choice(CHOSEN, "predicted", 24.0)))
                report.noisy += [f"{problem.key}, {count} tokens"] if noisy else []
        return report

    monkeypatch.setattr("lowbit.autotune.tune.tune", faulty)
    result = run("--tokens", "64", "--precision", "w8a8", "--db", str(tmp_path / "t.db"), *as_json)
    assert result.exit_code == exit_status
    assert "predicted" in result.stdout
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == exit_status
    for line in errors:
        assert f"attend h32/8 d64 q1 w8a8, 64 tokens (1 {status})" in line


@pytest.mark.parametrize(("winners", "exit_status"), [(2, 0), (1, 0), (0, 6)])
def test_what_has_no_winner_is_told_and_an_error_only_if_nothing_has_one(
    monkeypatch: pytest.MonkeyPatch, tuned: Recorder, tmp_path: Path, winners: int, exit_status: int
) -> None:
    def partly(*args: Any) -> TuneReport:
        report = tuned(*args)
        for decision in report.decisions[winners:]:
            report.undecided[f"{decision.problem}, {decision.tokens} tokens"] = "ptxas failed"
        del report.decisions[winners:]
        return report

    monkeypatch.setattr("lowbit.autotune.tune.tune", partly)
    result = run("--tokens", "64,512", "--precision", "w8a8", "--db", str(tmp_path / "t.db"))
    assert result.exit_code == exit_status
    assert ("Winners" in result.stdout) == (winners > 0)
    places = [f"attend h32/8 d64 q1 w8a8, {tokens} tokens" for tokens in (64, 512)][winners:]
    told = [line for line in result.stderr.splitlines() if "winner" in line]
    start = "no winner: " if winners else "error: no winner was found: "
    assert told == [f"{start}ptxas failed ({'; '.join(places)})"] * bool(places)


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_an_interrupt_says_that_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, as_json: list[str]
) -> None:
    def interrupted(*args: Any) -> TuneReport:
        raise TuneInterrupted(TuneReport({}, tmp_path))

    monkeypatch.setattr("lowbit.autotune.tune.tune", interrupted)
    result = run("--tokens", "64", "--db", str(tmp_path / "t.db"), *as_json)
    assert result.exit_code == 130
    assert result.stdout == ""
    assert "resumes" in result.stderr.splitlines()[-1]


def test_noise_has_its_own_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def noisy(*args: Any) -> TuneReport:
        raise NoiseError("the machine was too busy")

    monkeypatch.setattr("lowbit.autotune.tune.tune", noisy)
    result = run("--tokens", "64", "--db", str(tmp_path / "t.db"))
    assert (result.exit_code, result.stderr) == (8, "error: the machine was too busy\n")


@pytest.mark.parametrize("content", [b"not a database", b"SQLite format 3\0 but damaged"])
def test_a_foreign_database_is_refused_and_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.db"
    path.write_bytes(content)
    result = run("--model", "smollm2-135m", "--tokens", "64", "--db", str(path))
    assert result.exit_code == 5
    (line,) = result.stderr.splitlines()
    assert str(path) in line
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.db"]


def test_a_plugin_that_breaks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('first\\nsecond')")
    monkeypatch.syspath_prepend(tmp_path)
    result = run("--plugin", "broken_plugin", "--db", str(tmp_path / "t.db"))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "broken_plugin" in line
    assert "first second" in line
