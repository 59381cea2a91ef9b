"""`autotune db` on a database written by the store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from lowbit.autotune.cli import autotune
from lowbit.costmodel.gpu import gpu_named
from lowbit.db.described import long_names, short_names
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


BOARDS = ("RTX 3090", "RTX 3060")


@pytest.fixture
def several(path: Path) -> Path:
    """The same problem on two boards besides, and on a board that nobody described."""
    with Store.open(path) as store:
        prints = {gpu_named(board).fingerprint: board for board in BOARDS} | {"sm_75-40sm": "stranger"}
        for board in BOARDS:
            gpu = gpu_named(board)
            store.put_device(gpu.fingerprint, {**gpu.as_dict(), "isa": gpu.arch})
        for fingerprint, board in prints.items():
            for tokens in (256, 4096):
                store.put_winner(
                    Winner(
                        device=fingerprint, problem=PROBLEM, tokens=tokens, tokens_from=1, tokens_to=None,
                        candidate=f"layout of {board}; integer; rows 4, lanes 1, loads 4, stages 0, splits 8, warps 4",
                        provenance="predicted", predicted_us=3.0, toolchain="compiler 1",
                    )
                )  # fmt: skip
    return path


def test_winners_stand_under_their_device(several: Path) -> None:
    """Every winner comes after its own device's heading and before the next device's."""
    shown = run("winners", "--db", str(several))
    headings = [line for line in shown.splitlines() if line.startswith(f"{several}: ")]
    assert [heading.removeprefix(f"{several}: ") for heading in headings] == [
        "a test device", *(gpu_named(board).description for board in BOARDS), "sm_75-40sm",
    ]  # fmt: skip
    parts = [part.partition("\n")[2] for part in shown.split(f"{several}: ")[1:]]
    parts[-1] = parts[-1].partition(f"\n{PROBLEM} on ")[0]
    owners = [[name for name in (*BOARDS, "stranger") if f"layout of {name}" in part] for part in parts]
    assert owners == [[], ["RTX 3090"], ["RTX 3060"], ["stranger"]]
    assert "elsewhere" in parts[0]


def test_closing_lines_name_the_device_where_there_are_several(several: Path) -> None:
    told = [line for line in run("winners", "--db", str(several)).splitlines() if line.startswith(PROBLEM)]
    assert [line.partition(": ")[0] for line in told] == [
        f"{PROBLEM} on RTX 3090 (sm_86)", f"{PROBLEM} on RTX 3060 (sm_86)", f"{PROBLEM} on sm_75-40sm",
    ]  # fmt: skip
    alone = run("winners", "--db", str(several), "--device", "RTX 3060")
    assert f"\n{PROBLEM}: one layout at all lengths" in alone


@pytest.mark.parametrize(
    ("asked", "boards"),
    [
        ("RTX 3060", ["RTX 3060"]),
        ("nvidia geforce rtx3060", ["RTX 3060"]),
        (gpu_named("RTX 3090").fingerprint, ["RTX 3090"]),
        ("sm_86", ["RTX 3090", "RTX 3060"]),
        ("sm_75", ["sm_75-40sm"]),
        ("cpu", ["a test device"]),
        ("avx2", ["a test device"]),
        ("A test device", ["a test device"]),
        ("silicon-1", ["a test device"]),
        ("RTX 4090", []),
        ("sm_8", []),
    ],
)
def test_devices_answer_to_their_names(several: Path, asked: str, boards: list[str]) -> None:
    found = json.loads(run("winners", "--db", str(several), "--device", asked, "--json"))
    assert [name.partition(" (")[0] for name in found["devices"].values()] == boards
    assert {winner["device"] for winner in found["winners"]} == set(found["devices"])
    assert {each["device"] for each in found["phases"]} == set(found["devices"])


def test_asking_for_a_device_that_is_not_there_tells_those_that_are(several: Path) -> None:
    result = CliRunner().invoke(autotune, ["db", "winners", "--db", str(several), "--device", "sm_90"])
    assert result.exit_code == NoWinnerError.exit_status
    assert "its devices are a test device (avx2), RTX 3090 (sm_86), RTX 3060 (sm_86), sm_75-40sm" in result.stderr


def test_devices_that_say_the_same_of_themselves_are_told_apart() -> None:
    twins = {each: {"description": "a chip, 2 cores", "isa": "avx2"} for each in ("chip-1", "chip-2")}
    assert list(short_names(twins).values()) == ["a chip (avx2), chip-1", "a chip (avx2), chip-2"]
    assert list(long_names(twins).values()) == ["a chip, 2 cores, chip-1", "a chip, 2 cores, chip-2"]
