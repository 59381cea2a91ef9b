"""Tuning for a GPU that is not here, from machine code that is written by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from lowbit.autotune.cli import autotune
from lowbit.autotune.gpu_target import GpuPrices
from lowbit.autotune.outcome import Options
from lowbit.autotune.shipping import shipped_winner
from lowbit.autotune.target import target_for
from lowbit.autotune.tune import tune
from lowbit.costmodel.gpu import default_gpu, gpu_named
from lowbit.costmodel.gpu_lep import default_coefficients
from lowbit.db.store import Store
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.cuda.program import build
from lowbit.search.gpu_calibrate import GpuCalibration

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)

from fake_gpu import LOG, PACKINGS, PROBLEM, SPILLING, candidate  # noqa: E402

TOKENS = [256, 16384]
DEVICE = "fake_gpu:FakeGpu"


@pytest.fixture(autouse=True)
def backends_importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers inherit ``sys.path``, and import the backend from here. There is no default database."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv(LOG, str(path))
    return path


def options(path: Path, **more: Any) -> Options:
    return Options(path, DEVICE, **more)


def test_winners_are_predicted_by_the_boards_figures(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    data = json.loads(json.dumps(tune([PROBLEM], TOKENS, options(path)).as_dict()))
    assert (data["device"]["name"], data["device"]["fingerprint"]) == ("RTX 3090", default_gpu("sm_86").fingerprint)
    assert [(each["tokens"], each["provenance"]) for each in data["problems"]] == [(n, "predicted") for n in TOKENS]
    for each in data["problems"]:
        # Two heads of 64 channels, keys and values of 4 bits and a scale of 2 bytes to 32 of them, at 936 GB/s.
        floor_us = 2 * 2 * each["tokens"] * (64 / 2 + 64 / 32 * 2) / 936e3
        assert each["predicted_us"] > floor_us
        assert each["median_us"] is None
    assert data["statuses"] == {}
    (phases,) = data["phases"]
    assert phases["problem"] == PROBLEM.key
    assert phases["reason"].startswith(("one layout at all lengths", "changes between 256 and 16384 tokens"))
    with Store.open(path, "read") as store:
        assert {winner.provenance for winner in store.winners()} == {"predicted"}
        assert store.devices()[data["device"]["fingerprint"]]["isa"] == "sm_86"
        assert [run["command"] for run in store.info()["runs"]] == [
            f"autotune --device {DEVICE} --strategy lep ({PROBLEM.key} at 256,16384)"
        ]


def test_code_that_spills_is_pruned_and_code_that_does_not_compile_is_unpredicted(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    for _ in range(2):  # What was found in code is known the second time without the code.
        space = tune([PROBLEM], TOKENS, options(path)).as_dict()["space"]
        assert space == {
            "candidates": 7, "pruned": 2, "reasons": {"too many vectors": 1, "spills 24 bytes": 1},
            "unpredicted": {"ptxas failed": 1},
        }  # fmt: skip
        with Store.open(path, "read") as store:
            candidates, rejected = store.space(PROBLEM.key, default_gpu("sm_86").fingerprint)
        spilling = candidate(PACKINGS[0], SPILLING).name
        assert (spilling, "spills 24 bytes") in rejected
        assert spilling not in candidates


def test_opcodes_that_nobody_knows_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    for _ in range(2):  # as much from what is stored
        assert tune([PROBLEM], TOKENS, options(path)).as_dict()["unknown_opcodes"] == {"FROB": 1}
    shape = ["--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--precision", "w4a8", "--tokens", "256"]
    result = CliRunner().invoke(autotune, ["--device", DEVICE, *shape, "--db", str(path)])
    assert "opcodes that the analyzer does not know, priced as others are: FROB in 1 kernels" in result.stderr


def test_nothing_is_compiled_twice(tmp_path: Path, log: Path) -> None:
    path = tmp_path / "t.db"
    first = tune([PROBLEM], TOKENS, options(path))
    made = log.read_text().split()
    # Three packings, one that spills and one that fails; splits are run-time values.
    assert made.count("count") == 5
    assert made.count("ship") == len({w.choice.candidate.name for w in first.decisions})
    log.write_text("")
    again = tune([PROBLEM], TOKENS, options(path))
    assert log.read_text().split() == ["count"]  # the one that fails
    assert [d.choice for d in again.decisions] == [d.choice for d in first.decisions]


def test_another_board_needs_no_compiler_and_is_another_device(tmp_path: Path, log: Path) -> None:
    path = tmp_path / "t.db"
    tune([PROBLEM], TOKENS, options(path))
    log.write_text("")
    slower = tune([PROBLEM], TOKENS, options(path, gpu="RTX 3060"))
    assert "ship" not in log.read_text().split()
    assert slower.device["fingerprint"] == gpu_named("RTX 3060").fingerprint
    with Store.open(path, "read") as store:
        by_device = {w.device: w.predicted_us or 0.0 for w in store.winners() if w.tokens == TOKENS[1]}
    assert by_device[gpu_named("RTX 3060").fingerprint] > by_device[default_gpu("sm_86").fingerprint]


def test_winners_come_with_their_code_and_launches(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    for _ in range(2):
        tune([PROBLEM], TOKENS, options(path))
        with Store.open(path, "read") as store:
            for winner in store.winners():
                stored = store.shipped(winner)
                assert stored is not None
                shipped, images = stored
                program = build(PROBLEM, Candidate.parse(winner.candidate), "sm_86")
                assert shipped == shipped_winner(program)
                entries = [entry for entry in (program.main, program.merge) if entry is not None]
                assert [image.symbol for image in images] == [entry.symbol for entry in entries]
                assert images[0].cubin == b"code"
                assert (images[0].registers, images[0].shared_bytes) == (64, 128)


@pytest.mark.parametrize("tokens", [1, 33, 5000, 1_000_003])
def test_launches_follow_their_rules_at_lengths_that_were_not_looked_at(tokens: int) -> None:
    program = build(PROBLEM, candidate(PACKINGS[1]), "sm_86")
    main, merge = shipped_winner(program).launches
    for launch, geometry, entry in (
        (main, program.geometry(tokens), program.main),
        (merge, program.merge_geometry(tokens), program.merge),
    ):
        assert entry is not None
        assert tuple(rule.at(tokens) for rule in launch.grid) == geometry.grid
        assert (launch.threads, launch.shared_bytes.at(tokens)) == (geometry.threads, geometry.shared_bytes)
        constants = program.constants(tokens)
        wanted = {each.name: constants[each.name] for each in entry.parameters if each.name in constants}
        assert {name: rule.at(tokens) for name, rule in launch.constants.items()} == wanted
    assert shipped_winner(program).workspace_bytes.at(tokens) == program.workspace_bytes(tokens)


@pytest.mark.parametrize(("quick", "budget_s"), [(False, 150.0), (True, 90.0)])
def test_a_gpu_that_is_here_is_calibrated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool, budget_s: float
) -> None:
    board = default_gpu("sm_86")
    found = SimpleNamespace(name=board.name, arch="sm_86", sms=board.sms, memory_bytes=board.memory_bytes, ordinal=1)
    monkeypatch.setattr("lowbit.costmodel.gpu_here.gpus_here", lambda: [found])
    asked: list[tuple[Any, ...]] = []

    def calibrated(name: str, backend: Any, gpu: Any, ordinal: int, budget_s: float) -> GpuCalibration:
        asked.append((name, gpu, ordinal, budget_s))
        coefficients = default_coefficients(gpu)
        coefficients.values["launch_us"] = 20.0
        return GpuCalibration(coefficients, 900.0, 20.0, (), {}, 3.0)

    monkeypatch.setattr("lowbit.search.gpu_calibrate.calibrate_gpu", calibrated)
    path = tmp_path / "t.db"
    for _ in range(2):
        data = tune([PROBLEM], TOKENS, options(path, strategy="lep", quick=quick)).as_dict()
        assert all(each["predicted_us"] > 20 for each in data["problems"])
        assert data["device"]["chosen"] == "in this machine"
    assert asked == [(DEVICE, board, 1, budget_s)]
    # Elsewhere the calibration that came with the database is better than published figures.
    monkeypatch.setattr("lowbit.costmodel.gpu_here.gpus_here", list)
    again = tune([PROBLEM], TOKENS, options(path)).as_dict()
    assert [each["predicted_us"] for each in again["problems"]] == [each["predicted_us"] for each in data["problems"]]


def test_explaining_does_not_calibrate_a_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    board = default_gpu("sm_86")
    found = SimpleNamespace(name=board.name, arch="sm_86", sms=board.sms, memory_bytes=board.memory_bytes, ordinal=0)
    monkeypatch.setattr("lowbit.costmodel.gpu_here.gpus_here", lambda: [found])
    target = target_for(DEVICE)
    assert target.present and target.known_prices(None) is None
    assert target.rough_prices(lambda why: None) == GpuPrices(default_coefficients(board))


SHAPE = ("--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--precision", "w4a8")


def run(*args: str) -> Any:
    result = CliRunner().invoke(autotune, args)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize(
    ("command", "more"),
    [((), SHAPE), ((), (*SHAPE, "--json")), (("explain",), SHAPE), (("calibrate",), ())],
    ids=["tune", "json", "explain", "calibrate"],
)
@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        (("importlib.util.find_spec", None), "kernels for NVIDIA GPUs need numba-cuda: install the extra, pip install"),
        (("simulating", True), "nothing is compiled under NUMBA_ENABLE_CUDASIM=1"),
    ],
    ids=["no extra", "simulator"],
)
def test_nothing_is_begun_where_nothing_can_be_compiled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    more: tuple[str, ...],
    lacking: tuple[str, Any],
    told: str,
) -> None:
    monkeypatch.setattr("lowbit.kernels.cuda.ptx.simulating", lambda: False)
    monkeypatch.setattr("lowbit.kernels.cuda.ptx.importlib.util.find_spec", lambda name: object())
    name, answer = lacking
    monkeypatch.setattr(f"lowbit.kernels.cuda.ptx.{name}", lambda *_: answer)
    path = tmp_path / "t.db"
    result = CliRunner().invoke(autotune, [*command, "--device", "sm_86", *more, "--db", str(path)])
    _, error = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (4, "")
    assert error.startswith(f"error: {told}")
    assert not path.exists()


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize(
    ("device", "budget", "why"),
    [
        ("fake_gpu:WithoutAssembler", [], f"ptxas failed ({PROBLEM.key}, 256 tokens; {PROBLEM.key}, 512 tokens)"),
        (
            DEVICE,
            ["--budget", "0.000001"],
            f"not counted within the budget ({PROBLEM.key}, 256 tokens; {PROBLEM.key}, 512 tokens); "
            "the same command goes on, further with a longer budget",
        ),
    ],
)
def test_a_run_without_a_single_winner_says_why_and_fails(
    tmp_path: Path, device: str, budget: list[str], why: str, as_json: list[str]
) -> None:
    arguments = ["--device", device, *SHAPE, "--tokens", "256,512", *budget, *as_json, "--db", str(tmp_path / "t.db")]
    result = CliRunner().invoke(autotune, arguments)
    assert result.exit_code == 6
    assert [line for line in result.stderr.splitlines() if "winner" in line] == [f"error: no winner was found: {why}"]
    if as_json:
        assert set(json.loads(result.stdout)["rounds"]["undecided"]) == {
            f"{PROBLEM.key}, {n} tokens" for n in (256, 512)
        }
    else:
        assert result.stdout == ""


def test_the_command_says_which_board_it_takes_and_why_layouts_stay(tmp_path: Path) -> None:
    path = str(tmp_path / "t.db")
    result = run("--device", DEVICE, *SHAPE, "--tokens", "256,16384", "--db", path)
    assert "RTX 3090" in result.stderr and "the most common board of sm_86" in result.stderr
    assert f"{PROBLEM.key}: " in result.stdout
    shown = run("db", "winners", "--db", path)
    (told,) = [line for line in shown.stdout.splitlines() if line.startswith(f"{PROBLEM.key}: ")]
    assert told in result.stdout.splitlines()
    assert "limited by" in told or "slower" in told


def test_explaining_tells_unpacking_and_what_the_loop_does() -> None:
    shown = run("explain", "--device", DEVICE, *SHAPE, "--tokens", "4096", "--json")
    told = json.loads(shown.stdout)
    assert told["provenance"] == "predicted" and told["unfit"] == {"spills 24 bytes": 1}
    assert told["uncounted"] == {"ptxas failed": 1}
    # A warp's pass over a tile is 2 × 32 tokens of 64 channels, with n instructions of 32 lanes that unpack.
    expected = {"contiguous": 0.0, "contiguous_permuted": 32 * 32 / 4096, "lane_interleaved": 2 * 32 * 32 / 4096}
    assert told["unpack_ops_per_32"] == pytest.approx(expected)
    kernel = told["choice"]["kernel"]
    assert (kernel["registers"], kernel["counted"], kernel["unknown"]) == (64, "sass", {})
    (loop,) = [each for each in kernel["loops"] if each["loop"] == "tile"]
    assert loop["instructions"]["dot"] == 4 and "convert" not in loop["instructions"]
    assert sum(told["choice"]["terms_us"].values()) == pytest.approx(told["choice"]["predicted_us"])


def test_people_see_registers_and_the_code_on_request() -> None:
    arguments = ("explain", "--device", DEVICE, *SHAPE, "--tokens", "4096", "--code")
    shown = run(*arguments).stdout
    for words in ("registers", "occupancy", "IDP.4A", "PTX here", "machine code for sm_86"):
        assert words in shown
