"""`autotune explain` over a backend whose assembly is written by hand, so that every count is known."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lowbit.autotune.cli import autotune
from lowbit.autotune.cpu_target import CpuPrices, CpuTarget
from lowbit.autotune.explain import Knowledge, explain
from lowbit.autotune.kept import KeptTiles
from lowbit.costmodel.assembly import CLASSES
from lowbit.costmodel.bandwidth import Bandwidth, BandwidthPoint
from lowbit.costmodel.device import detect
from lowbit.costmodel.lep import Coefficients
from lowbit.db.records import Measurement, Winner
from lowbit.db.store import Store
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.errors import DatabaseError
from lowbit.kernels.packing import packings
from lowbit.search.features import Features
from lowbit.search.messages import Count, Counted, Request, Setup
from lowbit.search.tiles import TileCounter
from lowbit.search.worker import Workbench

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)

from hand_written import PROBLEM, SHIFTS, TOKENS, HandWritten, PartlyUncountable, assembly, candidate  # noqa: E402

TOOLCHAIN = "by hand 1"


@pytest.fixture(autouse=True)
def backends_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers inherit ``sys.path``, and import the backends from here."""
    monkeypatch.syspath_prepend(HERE)


def coefficients(first_gbps: float = 10.0) -> Coefficients:
    """A machine whose shifts cost 1 ns each and everything else nothing, and whose memory delivers 10 GB/s."""
    values = dict.fromkeys((f"{kind}_ns" for kind in CLASSES), 0.0) | {"shift_ns": 1.0}
    values |= {"exponential_ns": 0.0, "task_us": 0.0, "fork_us": 0.0, "gamma": 0.0}
    points = (BandwidthPoint(1, 1 << 17, first_gbps, "L1"), BandwidthPoint(1, 1 << 18, 10.0, "DRAM"))
    return Coefficients("extended", values, Bandwidth(points), 1)


def prices(first_gbps: float = 10.0) -> CpuPrices:
    return CpuPrices(coefficients(first_gbps), 1, max(cache.size_bytes for cache in detect().caches))


class InProcess:
    """A crew of one that works here, and notes what it is asked to count."""

    def __init__(self, setup: Setup, size: int = 1) -> None:
        self._bench = Workbench(setup, lambda stage: None)
        self.asked: list[str] = []

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def work(self, requests: Sequence[Request], until: float | None = None) -> Iterator[tuple[Request, Any]]:
        for request in requests:
            assert isinstance(request, Count)
            self.asked += [symbol for symbol, _ in request.tiles]
            reply = self._bench.answer(request)
            assert isinstance(reply, Counted)
            yield request, reply


def answer(knowledge: Knowledge, protocol: str = "warm", backend: type[HandWritten] = HandWritten) -> Any:
    seen: list[tuple[str, int, int | None]] = []

    def report(phase: str, done: int, total: int | None, message: str) -> None:
        seen.append((phase, done, total))

    crew: Any = InProcess(Setup(f"hand_written:{backend.__name__}"))
    with KeptTiles(None) as tiles:
        target = CpuTarget("by hand", backend(), 1)
        counter = TileCounter(target.backend, crew, tiles, TOOLCHAIN)
        explained = explain(PROBLEM, TOKENS, target, counter, knowledge, protocol, report)
    assert seen[-1][1] == seen[-1][2]
    return explained


def test_counts_are_of_each_packings_best_integer_kernel() -> None:
    explained = answer(Knowledge())
    # 64 values in an iteration, so half the instructions for 32; the codings' minimum; rejected ones are left out.
    assert explained.unpack_ops_per_32 == {"contiguous": 3.0, "planes": 1.0}
    by_name = {cost.packing.name: cost for cost in explained.packings}
    assert set(by_name) == {packing.name for packing in packings("int4")}
    for name, shifts in SHIFTS.items():
        assert by_name[name].unpack_ops_per_32 == shifts / 2
        assert by_name[name].candidate.schedule.rows == 4
        assert by_name[name].unpacking == {"k": {"vpsrlw": shifts}}
    rejected = by_name["int4/lane_interleaved/signed"]
    assert (rejected.candidate, rejected.reason) == (None, "lane_interleaved does not fit")


def test_with_coefficients_the_prediction_chooses_and_its_terms_add_up() -> None:
    explained = answer(Knowledge(prices()))
    assert explained.provenance == "predicted"
    # No shift at all in the float pipeline; planes with 4 rows is the best of the other layouts.
    assert explained.choice.candidate.pipeline == "float"
    assert explained.runner_up.candidate == candidate("int4/planes/offset", 4)
    # A shift costs 1 ns and nothing else costs anything.
    assert explained.runner_up.predicted_us == pytest.approx(explained.runner_up.features.instructions["shift"] * 1e-3)
    assert explained.runner_up.predicted_us > explained.choice.predicted_us
    assert sum(explained.terms_us.values()) == pytest.approx(explained.choice.predicted_us)


def test_cold_predictions_wait_for_memory() -> None:
    knowledge = Knowledge(prices(first_gbps=20.0))
    assert answer(knowledge, "warm").terms_us["memory"] == 0
    cold = answer(knowledge, "cold")
    # Codes: 2 heads × 256 tokens × 32 bytes; scales: 2 heads × 256 tokens × 2 groups × 2 bytes; all in whole lines.
    assert cold.choice.features.bytes == 2 * 256 * 32 + 2 * 256 * 2 * 2
    assert cold.terms_us["memory"] == pytest.approx(cold.choice.features.bytes * (1 / 10 - 1 / 20) * 1e-3)


def test_code_that_cannot_be_counted_is_left_out_and_said() -> None:
    explained = answer(Knowledge(), backend=PartlyUncountable)
    assert explained.uncounted == {"no loop here": 4}
    assert explained.unpack_ops_per_32 == {"contiguous": 3.0}


def test_without_coefficients_nothing_is_predicted() -> None:
    explained = answer(Knowledge())
    assert explained.choice.predicted_us is None
    assert explained.terms_us == {}


def measured(name: str, median_us: float) -> Measurement:
    return Measurement(
        device="silicon", problem=PROBLEM.key, tokens=TOKENS, candidate=name, protocol="warm", status="ok",
        median_us=median_us, spread=0.01, samples=9, toolchain="by hand 1",
    )  # fmt: skip


def test_a_stored_winner_is_the_choice_and_the_fastest_measured_one_the_runner_up() -> None:
    best, second = candidate("int4/contiguous/offset", 4), candidate("int4/contiguous/signed", 2)
    winner = Winner(
        device="silicon", problem=PROBLEM.key, tokens=TOKENS, tokens_from=1, tokens_to=None, candidate=best.name,
        provenance="measured", median_us=5.0, samples=9, protocol="warm", toolchain="by hand 1",
    )  # fmt: skip
    timings = {each.name: measured(each.name, time_us) for each, time_us in ((best, 5.0), (second, 6.0))}
    explained = answer(Knowledge(prices(), timings, winner))
    assert explained.provenance == "measured"
    assert (explained.choice.candidate, explained.choice.median_us) == (best, 5.0)
    assert (explained.runner_up.candidate, explained.runner_up.median_us) == (second, 6.0)


def elsewhere(chosen: Candidate, tokens: int) -> Winner:
    return Winner(
        device="silicon", problem=PROBLEM.key, tokens=tokens, tokens_from=1, tokens_to=None, candidate=chosen.name,
        provenance="predicted", predicted_us=5.0, toolchain="by hand 1",
    )  # fmt: skip


def test_a_winner_of_another_length_that_is_predicted_to_be_slow_here_is_told() -> None:
    slow = candidate("int4/contiguous/signed", 2)
    # Memory takes a little time here, so that no prediction is 0.
    known = Knowledge(prices(first_gbps=10.5), {}, elsewhere(slow, TOKENS // 2))
    explained = answer(known, "cold")
    assert explained.choice.candidate == slow
    # The float pipeline does not shift at all: nothing is faster.
    assert explained.faster.candidate.pipeline == "float"
    assert explained.faster.predicted_us == pytest.approx(explained.terms_us["memory"])
    # At its own length the winner was chosen knowingly.
    assert answer(replace(known, winner=elsewhere(slow, TOKENS)), "cold").faster is None
    # The fastest is not beaten, and nothing is predicted without prices.
    fastest = candidate("int4/contiguous/signed", 4, "float")
    assert answer(replace(known, winner=elsewhere(fastest, TOKENS // 2)), "cold").faster is None
    assert answer(replace(known, prices=None), "cold").faster is None


@pytest.mark.parametrize(("share", "clear"), [(1.02, False), (1.04, True)])
def test_a_prediction_that_ties_with_the_winners_is_not_told(
    share: float, clear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = candidate("int4/contiguous/signed", 2)

    def predict_us(self: CpuPrices, features: Sequence[Features]) -> list[float]:
        most = max(each.unpack_ops_per_32 for each in features)
        return [10.0 * (share if each.unpack_ops_per_32 == most else 1.0) for each in features]

    monkeypatch.setattr(CpuPrices, "predict_us", predict_us)
    assert (answer(Knowledge(prices(), {}, elsewhere(slow, 2 * TOKENS))).faster is not None) == clear


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A database with a calibration and a winner of this device; the command counts in this process."""
    monkeypatch.setattr("lowbit.search.crew.Crew", InProcess)
    path = tmp_path / "t.db"
    device = detect().fingerprint
    name = candidate("int4/planes/signed", 2).name
    with Store.open(path) as store:
        store.put_calibration(device, 1, {"extended": coefficients().as_dict()}, "by hand 1")
        store.put_winner(
            Winner(
                device=device, problem=PROBLEM.key, tokens=128, tokens_from=1, tokens_to=512, candidate=name,
                provenance="verified", median_us=7.0, samples=9, protocol="warm", toolchain="by hand 1",
            )
        )  # fmt: skip
    return path


ARGUMENTS = (
    *("--device", "hand_written:HandWritten", "--operator", "qk", "--precision", "w4a8"),
    *("--heads", "8", "--kv-heads", "2", "--head-dim", "64"),
)


def run(path: Path | None, *more: str) -> Any:
    database = () if path is None else ("--db", str(path))
    args = ["explain", *ARGUMENTS, "--tokens", str(TOKENS), "--threads", "1", *database, *more]
    result = CliRunner().invoke(autotune, args)
    assert result.exit_code == 0, result.output
    return result


def told(result: Any) -> list[str]:
    """What stderr says besides how far the work is."""
    return [line for line in result.stderr.splitlines() if not line.startswith(("enumerating", "counting"))]


def test_json_is_one_object(by_hand: Path) -> None:
    explained = json.loads(run(by_hand, "--json").stdout)
    assert explained["unpack_ops_per_32"] == {"contiguous": 3.0, "planes": 1.0}
    assert (explained["problem"], explained["tokens"], explained["isa"]) == (PROBLEM.key, TOKENS, "by_hand")
    assert explained["provenance"] == "verified"
    assert (explained["winner"]["tokens"], explained["threads"]) == (128, 1)
    assert explained["choice"]["layout"] == "K: T D | int4/planes/signed"
    assert explained["choice"]["predicted_us"] == pytest.approx(sum(explained["choice"]["terms_us"].values()))
    assert explained["runner_up"]["pipeline"] == "float"
    assert "code" not in explained


def test_counts_are_kept_and_nothing_else_changes(by_hand: Path) -> None:
    with Store.open(by_hand) as store:
        counts = store.info()["counts"]
    first = run(by_hand, "--json").stdout
    with Store.open(by_hand, "read") as store:
        # Four packings that are legal, each with two numbers of rows, and the float pipeline.
        assert store.info()["counts"] == {**counts, "tiles": 9}
        assert {f"{each}_integer_2" for each in ("int4_planes_signed", "int4_contiguous_offset")} < set(
            store.tiles(TOOLCHAIN)
        )
    before = by_hand.read_bytes()
    assert run(by_hand, "--json").stdout == first
    assert by_hand.read_bytes() == before


def test_a_database_that_cannot_be_written_is_only_read(by_hand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: Path) -> Any:
        raise DatabaseError(f"{path} cannot be written")

    before = by_hand.read_bytes()
    monkeypatch.setattr("lowbit.db.session.open_for_tuning", refuses)
    result = run(by_hand, "--json")
    assert json.loads(result.stdout)["provenance"] == "verified"
    assert by_hand.read_bytes() == before
    assert told(result) == [f"what was counted is not kept: {by_hand} cannot be written"]


@pytest.fixture
def nowhere(by_hand: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is calibrated, and there is no default database; a path where there is none yet."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(CpuTarget, "rough_prices", lambda self, report: prices())
    return tmp_path / "new.db"


def test_without_a_database_counts_are_not_kept_and_that_is_said(nowhere: Path) -> None:
    result = run(None, "--json")
    assert told(result) == ["what was counted is not kept: name a database with --db"]
    assert json.loads(result.stdout)["provenance"] == "predicted"


def test_nothing_is_said_where_nothing_had_to_be_counted() -> None:
    with KeptTiles(None) as kept:
        assert kept.tiles(TOOLCHAIN, ["a"]) == {}
    assert kept.lost == ""


def test_a_database_that_is_not_there_is_made_for_counts(nowhere: Path) -> None:
    first, again = run(nowhere, "--json"), run(nowhere, "--json")
    assert (told(first), told(again)) == ([f"{nowhere} is made, for what is counted"], [])
    assert first.stdout == again.stdout
    with Store.open(nowhere, "read") as store:
        counts = store.info()["counts"]
    assert {name: number for name, number in counts.items() if number} == {"tiles": 9}


def test_a_database_in_a_directory_that_is_not_there_is_refused(nowhere: Path) -> None:
    path = nowhere.parent / "mistyped" / "t.db"
    result = CliRunner().invoke(autotune, ["explain", *ARGUMENTS, "--db", str(path)])
    assert result.exit_code == DatabaseError.exit_status
    assert not path.parent.exists()


def test_the_command_counts_in_workers(by_hand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = run(by_hand, "--json").stdout
    monkeypatch.undo()
    monkeypatch.syspath_prepend(HERE)
    with Store.open(by_hand) as store:
        store.put_tiles(TOOLCHAIN, {symbol: {} for symbol in store.tiles(TOOLCHAIN)})
    assert run(by_hand, "--json").stdout == here


def test_a_winner_of_another_toolchain_is_named_but_not_considered(
    by_hand: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HandWritten, "toolchain", lambda self: "by hand 2")
    result = run(by_hand, "--json")
    assert candidate("int4/planes/signed", 2).name in result.stderr
    explained = json.loads(result.stdout)
    assert (explained["provenance"], explained["winner"]) == ("predicted", None)


def test_people_are_told_to_tune_the_length_that_they_ask_about(by_hand: Path) -> None:
    with Store.open(by_hand) as store:
        slower = coefficients(first_gbps=10.5).as_dict()
        store.put_calibration(detect().fingerprint, 1, {"extended": slower}, "by hand 1")
    result = run(by_hand, "--json")
    explained = json.loads(result.stdout)
    ratio = explained["choice"]["predicted_us"] / explained["runner_up"]["predicted_us"]
    fastest = candidate("int4/contiguous/signed", 4, "float")
    assert ratio > 1.03
    assert told(result) == [
        f"the stored winner was tuned at 128 tokens; {fastest} is predicted {ratio:.2f}× faster at {TOKENS}: "
        "tune that length"
    ]


def test_json_with_code_holds_ir_and_assembly(by_hand: Path) -> None:
    (code,) = json.loads(run(by_hand, "--json", "--code").stdout)["code"]
    assert code["assembly"] == assembly("int4_planes_signed_integer_2", SHIFTS["int4/planes/signed"] + 1)
    assert code["ir"] == "define void @int4_planes_signed_integer_2()"


def test_people_see_the_counts_and_the_code_on_request(by_hand: Path) -> None:
    shown = run(by_hand).stdout
    for words in (
        "int4/planes/offset",
        "1.00",
        "2 vpsrlw",
        "lane_interleaved does not fit",
        "verified",
        "shift",
        "threads",
    ):
        assert words in shown
    assert "vpdpbusd" not in shown
    assert assembly("int4_planes_signed_integer_2", SHIFTS["int4/planes/signed"] + 1) in run(by_hand, "--code").stdout


def test_another_instruction_set_is_named_or_refused() -> None:
    result = CliRunner().invoke(autotune, ["explain", *ARGUMENTS, "--device", "cpu", "--isa", "mmx"])
    assert result.exit_code == 3
    assert "mmx" in result.stderr


def test_a_gpus_kernel_has_no_threads_of_the_host(nowhere: Path) -> None:
    arguments = ("--device", "fake_gpu:FakeGpu", "--heads", "8", "--kv-heads", "2", "--head-dim", "64")
    asked = ["explain", *arguments, "--precision", "w4a8", "--tokens", "256", "--db", str(nowhere)]
    shown = CliRunner().invoke(autotune, asked)
    (facts, *_) = shown.stdout.partition("Candidates")
    assert "provenance" in facts and "threads" not in facts
    explained = json.loads(CliRunner().invoke(autotune, [*asked, "--json"]).stdout)
    assert explained["threads"] is None
