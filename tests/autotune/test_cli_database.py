"""`autotune db` on a database written by the store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from lowbit.autotune.cli import autotune
from lowbit.db.records import Winner
from lowbit.db.store import Store
from lowbit.kernels.errors import NoWinnerError

LAYOUT = "K: T D | int8/bytes/signed; V: T/16 D/4 t16 d4 | int8/bytes/offset"
CANDIDATE = f"{LAYOUT}; integer; rows 4, registers 2, block 64, splits 1, prefetch 0, threads 1"
UNKNOWN = "K: T D | int8/elsewhere/signed; integer; rows 4, registers 2, block 64, splits 1, prefetch 0, threads 1"
PROBLEM, OTHER = "attend h8/2 d64 q1 w8a8", "qk h4/4 d32 q1 w8a8"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "t.db"
    with Store.open(path) as store:
        store.put_device("silicon-1", {"description": "a test device", "isa": "avx2", "cores": 2})
        store.put_winner(
            Winner(
                device="silicon-1", problem=PROBLEM, tokens=512, tokens_from=257, tokens_to=1024, candidate=CANDIDATE,
                provenance="verified", predicted_us=20.0, median_us=25.0, spread=0.01, samples=30, protocol="warm",
                tied=(), baseline_us=100.0, bandwidth_share=0.5, toolchain="compiler 1",
            )
        )  # fmt: skip
        store.put_winner(
            Winner(
                device="silicon-1", problem=OTHER, tokens=128, tokens_from=1, tokens_to=None, candidate=UNKNOWN,
                provenance="predicted", predicted_us=3.0, toolchain="compiler 1",
            )
        )  # fmt: skip
    return path


def run(*args: str) -> str:
    result = CliRunner().invoke(autotune, ["db", *args])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def test_winners_as_json(path: Path) -> None:
    found = json.loads(run("winners", "--db", str(path), "--json"))
    assert found["db"] == str(path)
    first, second = found["winners"]
    assert (first["problem"], first["tokens"], first["candidate"]) == (PROBLEM, 512, CANDIDATE)
    assert first["speedup"] == 4.0
    assert (second["provenance"], second["median_us"], second["speedup"]) == ("predicted", None, None)


def test_winners_of_one_problem_or_device(path: Path) -> None:
    only = json.loads(run("winners", "--db", str(path), "--problem", OTHER, "--json"))["winners"]
    assert [winner["problem"] for winner in only] == [OTHER]
    assert json.loads(run("winners", "--db", str(path), "--device", "elsewhere", "--json"))["winners"] == []


def test_winners_for_people(path: Path) -> None:
    shown = run("winners", "--db", str(path))
    for words in (PROBLEM, "257 to 1024", "verified", "25", "4.00×", "50%", "elsewhere"):
        assert words in shown


def test_asking_for_winners_that_are_not_there(path: Path) -> None:
    result = CliRunner().invoke(autotune, ["db", "winners", "--db", str(path), "--problem", "nothing"])
    assert result.exit_code == NoWinnerError.exit_status
    assert "holds no winners for problem 'nothing'" in result.output


def test_info(path: Path) -> None:
    facts = json.loads(run("info", "--db", str(path), "--json"))
    assert facts["db"] == str(path)
    assert "silicon-1" in json.dumps(facts)
    assert "silicon-1" in run("info", "--db", str(path))


def test_reading_leaves_the_file_as_it_was(path: Path) -> None:
    before = path.read_bytes()
    run("info", "--db", str(path))
    run("winners", "--db", str(path))
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_info_for_people_has_words_for_keys(path: Path) -> None:
    with Store.open(path) as store:
        store.finish_run(store.put_run("autotune --device cpu"), "interrupted")
    shown = run("info", "--db", str(path))
    for words in (
        "a test device",
        "winners stored",
        "winners, verified",
        "run 1",
        "autotune --device cpu",
        "interrupted",
    ):
        assert words in shown
    assert "size_bytes" not in shown and "counts." not in shown


def test_winners_say_whether_the_layout_changes(path: Path) -> None:
    with Store.open(path) as store:
        for tokens, name in ((32, CANDIDATE), (4096, UNKNOWN)):
            store.put_winner(
                Winner(
                    device="silicon-1", problem=OTHER, tokens=tokens, tokens_from=1, tokens_to=None, candidate=name,
                    provenance="predicted", predicted_us=3.0, toolchain="compiler 1",
                )
            )  # fmt: skip
    found = {each["problem"]: each for each in json.loads(run("winners", "--db", str(path), "--json"))["phases"]}
    assert (found[PROBLEM]["changes"], found[OTHER]["changes"]) == (False, True)
    assert [each["tokens"] for each in found[OTHER]["layouts"]] == [[32], [128, 4096]]
    assert found[OTHER]["device"] == "silicon-1"
    # A problem with one length has nothing to say.
    shown = run("winners", "--db", str(path))
    assert f"{OTHER}: changes between 32 and 128 tokens" in " ".join(shown.split())
    assert f"{PROBLEM}: " not in shown
