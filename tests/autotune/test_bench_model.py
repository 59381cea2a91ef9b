"""Whole models compared: processes with fakes of known speeds, what the report says, and the real contestants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lowbit.autotune.bench import model_run
from lowbit.autotune.bench.messages import Leave, Opened, Refused, Taken
from lowbit.autotune.bench.model_contestant import PLAIN, model_contestant_named
from lowbit.autotune.bench.model_messages import Check, Checked, ModelSetup, Reach, Reached, Repeat, Weigh, Weighed
from lowbit.autotune.bench.model_outcome import ModelCase, ModelOutcome, ModelRow, timed_row
from lowbit.autotune.bench.model_problems import model_cases
from lowbit.autotune.bench.model_run import Plan, bench_model
from lowbit.autotune.bench.model_worker import Stand
from lowbit.autotune.cli import autotune
from lowbit.autotune.outcome import Silent
from lowbit.kernels.errors import NoiseError, ProblemError
from lowbit.runtime.cache_types import REFERENCE, CacheTypes
from lowbit.search.rounds import Fault, Timed
from tiny_models import write_model

HERE = str(Path(__file__).parent)
INT8, INT4 = CacheTypes("q8_0", "q8_0"), CacheTypes("q4_0", "q4_0")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [HERE, *sys.path])


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' machine is shared."""
    monkeypatch.setattr("lowbit.search.rounds.tainted", lambda slot, contention: False)
    monkeypatch.setattr("lowbit.autotune.bench.model_outcome.MOST_SPREAD", 100)


def plan(*names: str, **changes: Any) -> Plan:
    given = {
        "model": Path("a.gguf"), "database": None, "names": tuple(f"fake_model:{each}" for each in names),
        "types": (REFERENCE,), "depths": (0, 8), "prompt": 40, "generate": 6, "threads": 2, "repetitions": 3,
    }  # fmt: skip
    return Plan(**{**given, **changes})


# -- the worker -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stand(importable: None) -> Stand:
    contestant = model_contestant_named("fake_model:Steady")
    contestant.open(ModelSetup("", 1, 0, (), Path("a.gguf"), None))
    return Stand(contestant, min(os.sched_getaffinity(0)), 5)


def test_repetitions_begin_at_the_depth_and_leave_nothing(stand: Stand) -> None:
    assert stand.answer(Reach(REFERENCE, 8, 40)) == Reached(None)
    session: Any = stand._decoder
    before = list(session.held)
    assert (len(before), session.context) == (8, 48)
    generated, prompt = stand.answer(Repeat("tg", 6)), stand.answer(Repeat("pp", 40))
    assert isinstance(generated, Taken) and isinstance(prompt, Taken)
    assert 6 * 2000 <= generated.samples_us[0] < 10 * 6 * 2000
    assert 40 * 200 <= prompt.samples_us[0] < 10 * 40 * 200
    assert session.held == before
    weighed = stand.answer(Weigh())
    assert isinstance(weighed, Weighed)
    assert weighed.before_bytes == 5 < (weighed.peak_bytes or 0)
    assert stand.answer(Leave()) == Opened()
    assert stand._decoder is None


def test_only_the_first_of_a_kind_is_preceded_by_an_untimed_one(stand: Stand) -> None:
    stand.answer(Reach(REFERENCE, 0, 40))
    session: Any = stand._decoder
    steps: list[int] = []
    real = session.step
    session.step = lambda token: (steps.append(token), real(token))[1]
    for _ in range(3):
        stand.answer(Repeat("tg", 4))
    assert len(steps) == 4 * 4
    assert steps[:4] == steps[4:8]  # the same random tokens


def test_what_fails_is_an_answer(stand: Stand) -> None:
    failed = stand.answer(Reach(CacheTypes("q8_0", "q8_0"), 4, 0))
    assert failed == Reached(None)
    broken = stand.answer(Repeat("pp", 100))  # more than there is room for
    assert isinstance(broken, Refused) and broken.status == "crashed"
    assert isinstance(stand.answer(Check(REFERENCE, 5)), Checked)


def test_the_worker_itself_imports_little() -> None:
    """Its memory is reported, also of contestants that need none of this."""
    heavy = "'llvmlite', 'numba', 'sqlite3', 'networkx', 'rich', 'gguf', 'tokenizers'"
    code = f"import sys, lowbit.autotune.bench.model_worker; print([n for n in ({heavy}) if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# -- the run --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("undisturbed")
def test_every_contestant_has_a_row_for_each_test() -> None:
    outcome = bench_model(plan("Steady", "Slow", "Missing", "Picky", types=(REFERENCE, INT4)), Silent())
    rows = {
        (row.impl.removeprefix("fake_model:"), row.case.types, row.case.depth, row.case.test): row
        for row in outcome.rows
    }
    assert len(rows) == len(outcome.rows) == 4 * 2 * 2 * 2
    for types in (REFERENCE, INT4):
        for depth in (0, 8):
            fast, slow = (rows[name, types, depth, "tg"] for name in ("Steady", "Slow"))
            assert len(fast.seconds) == 3
            assert fast.speed is not None and slow.speed is not None
            assert 1.5 < fast.speed / slow.speed < 6
            assert fast.speed <= 500 / (2 if types == INT4 else 1)
            assert rows["Missing", types, depth, "pp"].status == "absent"
    assert rows["Missing", INT4, 0, "tg"].message == "not installed: pip install it"
    assert rows["Picky", INT4, 0, "tg"].status == "unsupported"
    assert rows["Picky", REFERENCE, 0, "tg"].status == "ok"
    assert outcome.peers == {
        "fake_model:Steady": "1.0 on 2",
        "fake_model:Slow": "1.0 on 2",
        "fake_model:Missing": "absent: not installed: pip install it",
        "fake_model:Picky": "1.0 on 2",
    }
    assert outcome.rounds == 3 * sum(row.status == "ok" for row in outcome.rows)
    assert outcome.weights["fake_model:Steady", INT4].peak_bytes


@pytest.mark.usefixtures("undisturbed")
def test_a_crash_takes_one_depth_of_one_contestant() -> None:
    outcome = bench_model(plan("Steady", "Dying", prompt=0), Silent())
    found = {(row.impl, row.case.depth): row for row in outcome.rows}
    assert found["fake_model:Dying", 0].status == "ok"
    assert found["fake_model:Dying", 8].status == "crashed"
    assert found["fake_model:Dying", 8].message == "SIGABRT: GGML_ASSERT(n < 8) failed"
    assert found["fake_model:Steady", 8].status == "ok"


@pytest.mark.usefixtures("undisturbed")
def test_a_model_with_other_answers_than_llama_cpp_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_run, "PEER", "fake_model:Steady")
    outcome = bench_model(plan("Steady", "Slow", "Liar", depths=(0,), prompt=0), Silent())
    found = {row.impl.removeprefix("fake_model:"): row for row in outcome.rows}
    assert (found["Steady"].status, found["Slow"].status, found["Liar"].status) == ("ok", "ok", "wrong")
    assert "diverges from llama.cpp's by" in found["Liar"].message


def test_a_machine_that_is_too_busy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.search.rounds.tainted", lambda slot, contention: True)
    with pytest.raises(NoiseError, match="too busy"):
        bench_model(plan("Steady", depths=(0,), prompt=0, generate=1, repetitions=2), Silent())


def test_llama_cpp_joins_twice_where_values_are_f16() -> None:
    both = plan(names=("lowbit", "llama_cpp"))
    assert both.contestants(REFERENCE) == ["lowbit", "llama_cpp", PLAIN]
    assert both.contestants(CacheTypes("q8_0", "f16")) == ["lowbit", "llama_cpp", PLAIN]
    assert both.contestants(INT8) == ["lowbit", "llama_cpp"]
    assert plan("Steady").contestants(REFERENCE) == ["fake_model:Steady"]
    assert [case.test for case in plan("Steady", prompt=0).cases(INT8, 3)] == ["tg"]


# -- the report -----------------------------------------------------------------------------------------------------


def row(impl: str, types: CacheTypes, depth: int, speed: float, test: str = "tg") -> ModelRow:
    return ModelRow(ModelCase(types, depth, test, 100), impl, "ok", seconds=(100 / speed,) * 3)


def outcome_of(*rows: ModelRow) -> ModelOutcome:
    return ModelOutcome({}, 2, "m.gguf", rows=list(rows))


def test_ratios_are_with_the_faster_way_of_the_same_bits() -> None:
    found = outcome_of(
        row("lowbit", REFERENCE, 0, 60), row("llama_cpp", REFERENCE, 0, 20), row(PLAIN, REFERENCE, 0, 30),
        row("lowbit", INT8, 0, 90), row("llama_cpp", INT8, 0, 15),
        row("lowbit", INT8, 64, 80), row("llama_cpp", INT8, 64, 10), row("lowbit", INT4, 0, 1),
        row("lowbit", INT8, 0, 500, "pp"), row("llama_cpp", INT8, 0, 1000, "pp"),
        ModelRow(ModelCase(REFERENCE, 64, "tg", 100), "llama_cpp", "noisy"),
    ).as_dict()  # fmt: skip
    assert found["ratio_vs_llamacpp_same_bits"] == {"f16": {"0": 2.0}, "q8_0": {"0": 6.0, "64": 8.0}}
    assert found["ratio_vs_llamacpp_f16"] == {
        "f16": {"0": 2.0},
        "q8_0": {"0": 3.0},
        "q4_0": {"0": pytest.approx(1 / 30)},
    }
    assert found["prefill_ratio_vs_llamacpp_same_bits"] == {"q8_0": {"0": 0.5}}
    plain = found["rows"][2]
    assert (plain["impl"], plain["flash_attention"], plain["test"], plain["tokens_per_s"]) == (
        "llama_cpp",
        False,
        "tg100",
        pytest.approx(30),
    )
    assert "flash_attention" not in found["rows"][0]
    assert found["rows"][-1]["tokens_per_s"] is None


def test_memory_is_compared_with_the_smaller_way() -> None:
    found = outcome_of()
    found.weights = {
        ("lowbit", REFERENCE): Weighed(300, 100),
        ("llama_cpp", REFERENCE): Weighed(260, 100),
        (PLAIN, REFERENCE): Weighed(200, 100),
        ("lowbit", INT8): Weighed(250, 100),
        ("llama_cpp", INT8): Weighed(None, None),
    }
    memory = found.memory()
    assert memory["peak_rss_bytes"] == {"lowbit": {"f16": 300, "q8_0": 250}, "llama_cpp": {"f16": 200}}
    assert memory["model_rss_bytes"] == {"lowbit": {"f16": 200, "q8_0": 150}, "llama_cpp": {"f16": 100}}
    assert memory["peak_rss_ratio"] == {"f16": 1.5}
    assert memory["model_rss_ratio"] == {"f16": 2.0}


def test_a_median_needs_undisturbed_repetitions_that_agree() -> None:
    case = ModelCase(INT8, 0, "tg", 100)
    good = timed_row(case, "a", Timed("ok", (1e6, 1.2e6, 1.1e6), 4, 7), 3)
    assert (good.status, good.tainted) == ("ok", 4)
    assert good.speed == pytest.approx(100 / 1.1)
    assert timed_row(case, "a", Timed("ok", (1e6, 1e6), 4, 6), 3).status == "noisy"
    assert timed_row(case, "a", None, 1).message == "only 0 repetitions of it were undisturbed"
    wild = timed_row(case, "a", Timed("ok", (1e6, 2e6, 9e6), 0, 3), 3)
    assert (wild.status, wild.speed) == ("noisy", None)
    assert timed_row(case, "a", Fault("hung", "no answer"), 3).status == "hung"


# -- real contestants -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_model(path, head_dim=64, types="Q8_0")
    return path


def test_the_problems_of_a_model_are_its_matrices_and_attention(model: Path) -> None:
    cases = {(case.problem.key, case.tokens) for case in model_cases(model, 2, (REFERENCE, INT8), (6, 38))}
    attend = {(f"attend h4/2 d64 q1 {precision}", tokens) for precision in ("fp16", "w8a8") for tokens in (6, 38)}
    assert attend < cases
    matrices = {each for each in cases if each[0].startswith("gemv")}
    assert attend | matrices == cases
    assert ("gemv k64 c1 w8a8", 288) in matrices  # the head
    assert ("gemv k96 c1 w8a8", 64) in matrices  # down


@pytest.mark.usefixtures("undisturbed")
def test_the_real_ones_agree_and_are_timed(model: Path) -> None:
    pytest.importorskip("llama_cpp")
    types = (REFERENCE, CacheTypes("q8_0", "q8_0"))
    given = plan(names=("lowbit", "llama_cpp"), model=model, types=types, repetitions=1, depths=(0, 30))
    outcome = bench_model(given, Silent())
    assert [row.status for row in outcome.rows] == ["ok"] * (3 * 4 + 2 * 4), outcome.rows
    assert all(0 <= value < 0.1 for value in outcome.divergences.values())
    assert set(outcome.ratios("tg")) == {"f16", "q8_0"}
    assert set(outcome.ratios("pp")["f16"]) == {"0", "30"}


# -- the command ----------------------------------------------------------------------------------------------------


class Recorder:
    """Stands in for the run: keeps the plan."""

    plan: Plan

    def __call__(self, plan: Plan, progress: Any, device: Any) -> ModelOutcome:
        self.plan = plan
        found = outcome_of(row("lowbit", INT8, 7, 60), row("llama_cpp", INT8, 7, 20))
        found.weights = {("lowbit", INT8): Weighed(3 << 20, 1 << 20), ("llama_cpp", INT8): Weighed(2 << 20, 1 << 20)}
        return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    monkeypatch.setattr("lowbit.autotune.bench.model_run.bench_model", recorder)
    yield recorder


def run(*words: str) -> Any:
    return CliRunner().invoke(autotune, ["bench", "model", *words])


def test_options_are_those_of_llama_bench(asked: Recorder, tmp_path: Path, model: Path, monkeypatch: Any) -> None:
    tuned: list[Any] = []
    monkeypatch.setattr("lowbit.autotune.bench.winners.winners", lambda cases, path, *rest: tuned.append((cases, path)))
    words = (
        "-m",
        str(model),
        "-p",
        "32",
        "-n",
        "16",
        "-d",
        "0,100",
        "-t",
        "1",
        "-r",
        "4",
        "--db",
        str(tmp_path / "t.db"),
    )
    result = run(*words, "-ctk", "q8_0,q4_0", "-ctv", "q4_0", "--json")
    assert result.exit_code == 0, result.output
    assert asked.plan == Plan(
        model, tmp_path / "t.db", ("lowbit", "llama_cpp"), (CacheTypes("q8_0", "q4_0"), INT4), (0, 100), 32, 16, 1, 4
    )
    ((cases, path),) = tuned
    assert path == tmp_path / "t.db"
    assert {case.tokens for case in cases if case.problem.operator == "attend"} == {16, 116}
    found = json.loads(result.stdout)
    assert found["ratio_vs_llamacpp_same_bits"] == {"q8_0": {"7": pytest.approx(3.0)}}
    table = " ".join(run(*words).stdout.split())
    for part in ("tg100", "q8_0", "60.0", "3.00×", "model and cache with q8_0: 2 MiB, 2.00× llama.cpp's 1 MiB"):
        assert part in table


def test_nothing_is_tuned_if_that_is_not_wanted(asked: Recorder, model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("lowbit.autotune.bench.winners.winners", lambda *rest: pytest.fail("tuned"))
    monkeypatch.setattr("lowbit.autotune.options.default_database", lambda: tmp_path / "none.db")
    result = run("-m", str(model), "--no-tune")
    assert result.exit_code == 0, result.output
    assert asked.plan.database is None
    assert "none.db does not exist: using untuned layouts" in result.stderr
    assert run("-m", str(model), "--no-tune", "--db", str(tmp_path / "missing.db")).exit_code == 5
    assert run("-m", str(model), "--impl", "llama_cpp").exit_code == 0
    assert asked.plan.names == ("llama_cpp",)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("-p", "0", "-n", "0"), 2, "-p and -n are both 0"),
        (("-d", "0,-5"), 2, "a depth must be 0 tokens or more, not -5"),
        (("-d", "x"), 2, "'x' is not a whole number"),
        (("-ctk", "q5_1"), 2, "unknown cache type 'q5_1'"),
        (("--impl", "mlc"), 2, "unknown implementation 'mlc'"),
        (("--impl", "no_such_module:Peer"), 2, "cannot make 'no_such_module:Peer'"),
        (("-r", "0"), 2, "0 is not in the range"),
    ],
)
def test_bad_options_are_one_line(asked: Recorder, model: Path, words: tuple[str, ...], status: int, said: str) -> None:
    result = run("-m", str(model), *words)
    assert result.exit_code == status, result.output
    (line,) = result.stderr.splitlines()
    assert said in line
    assert not hasattr(asked, "plan")


def test_a_file_that_is_no_model_is_one_line(asked: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    result = run("-m", str(path), "--db", str(tmp_path / "t.db"))
    assert (result.exit_code, len(result.stderr.splitlines())) == (7, 1), result.output
    assert run("-m", str(tmp_path / "missing.gguf"), "--db", str(tmp_path / "t.db")).exit_code == 7


def test_names_of_contestants() -> None:
    with pytest.raises(ProblemError, match="choose from lowbit, llama_cpp"):
        model_contestant_named("torch")
