"""What targets say of themselves, and which options they have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lowbit.autotune.cpu_target import CpuTarget
from lowbit.autotune.gpu_target import GpuPrices, GpuTarget
from lowbit.autotune.outcome import Options
from lowbit.autotune.target import stored_prices, target_for
from lowbit.autotune.tune import tune
from lowbit.costmodel.device import detect
from lowbit.costmodel.gpu import default_gpu, gpu_named
from lowbit.costmodel.gpu_features import GpuFeatures
from lowbit.costmodel.gpu_lep import GPU, default_coefficients, predict_us
from lowbit.costmodel.gpu_pipes import PIPES
from lowbit.costmodel.kernel_counts import KernelCounts, LoopCounts
from lowbit.db.store import Store
from lowbit.kernels.candidate import Candidate, Launch
from lowbit.kernels.cuda.marks import K_STEP, TILE
from lowbit.kernels.errors import DeviceError
from lowbit.kernels.layout import Layout
from lowbit.kernels.problem import Problem

PROBLEM = Problem("attend", 24, 8, 128, "w8a8")
LAYOUT = Layout.parse("T D | int8/bytes/signed")


def launch(**changes: int) -> Candidate:
    plan = {"rows": 3, "lanes": 1, "loads": 4, "stages": 0, "splits": 16, "warps": 4}
    return Candidate(LAYOUT, LAYOUT, "integer", Launch(**{**plan, **changes}))


def counts(**changes: Any) -> KernelCounts:
    loops = (
        LoopCounts(None, 0, {"integer": 9}, {}, {"IADD3": 9}),
        LoopCounts(TILE, 1, {"float": 2, "dot": 0}, {}, {"FADD": 2}),
        LoopCounts(K_STEP, 2, {"dot": 16, "logic": 4}, {"LOP3": 4}, {"IDP": 16, "LOP3": 4}),
    )
    known = {
        "symbol": "k", "role": "kv", "rows": 3, "packing": "p", "language": "sass", "registers": 64,
        "shared_bytes": 0, "spill_bytes": 0, "loops": loops, "unknown": {},
    }  # fmt: skip
    return KernelCounts(**{**known, **changes})


def features(**changes: Any) -> GpuFeatures:
    known: dict[str, Any] = {
        "dram_bytes": 1e6, "footprint_bytes": 1e6, "l2_bytes": 1e6, "loaded_bytes": 1e6, "sectors_per_ideal": 1.0,
        "instructions": {},
        "pipes": dict.fromkeys(PIPES, 0.0), "shared_wavefronts": 0.0, "l1_cycles": 0.0, "registers": 64,
        "shared_bytes": 0, "blocks": 128, "warps": 4, "blocks_per_sm": 8, "limiter": "registers", "waves": 1.0,
        "tail": 1.0, "balance": 1.0, "in_flight_bytes": 1e5, "rounds": 1.0, "chain": 1.0, "chain_instructions": 10.0,
        "launches": 2, "merge_bytes": 1e4, "unpack_ops": 0.0, "unpack_ops_per_32": 0.0, "stages": 0,
    }  # fmt: skip
    return GpuFeatures(**{**known, **changes})


def test_a_bare_architecture_is_its_most_common_board_and_says_so() -> None:
    target = target_for("sm_86")
    assert isinstance(target, GpuTarget)
    assert target.fingerprint == default_gpu("sm_86").fingerprint
    told = target.as_dict()
    assert (told["name"], told["isa"], told["cores"]) == ("RTX 3090", "sm_86", 82)
    assert "most common board of sm_86" in told["chosen"]
    assert not target.present


def test_a_board_is_chosen_by_name_within_its_architecture() -> None:
    assert target_for("sm_86", gpu="rtx 3060").fingerprint == gpu_named("RTX 3060").fingerprint
    with pytest.raises(DeviceError, match="RTX 4090 is sm_89, not sm_86: choose one of RTX 3090"):
        target_for("sm_86", gpu="RTX 4090")
    with pytest.raises(DeviceError, match=r"unknown GPU 'RTX 9'.*RTX 3090"):
        target_for("sm_86", gpu="RTX 9")


def test_an_unknown_architecture_is_refused_with_the_list() -> None:
    with pytest.raises(DeviceError, match=r"sm_87x.*sm_75.*sm_120"):
        target_for("sm_87x")


def test_options_of_one_kind_of_device_are_refused_by_the_other() -> None:
    with pytest.raises(DeviceError, match="--threads is for CPUs"):
        target_for("sm_86", threads=2)
    with pytest.raises(DeviceError, match="'RTX 4090' goes with --device sm_89, not with 'cpu'"):
        target_for("cpu", gpu="RTX 4090")
    with pytest.raises(DeviceError, match="--isa names instruction sets of CPUs, not of 'sm_86'"):
        target_for("sm_86", isa="avx2")


def here(name: str, sms: int, memory_bytes: int) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, arch="sm_86", sms=sms, memory_bytes=memory_bytes, clock_mhz=1800.0, bandwidth_gbps=500.0,
        l2_bytes=4 << 20,
    )  # fmt: skip


def test_the_board_that_is_here_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine_has(*found: SimpleNamespace) -> None:
        monkeypatch.setattr("lowbit.costmodel.gpu_here.gpus_here", lambda: list(found))

    machine_has(here("NVIDIA GeForce RTX 3060", 28, 12 << 30))
    assert (target_for("sm_86").fingerprint, target_for("sm_86").present) == (gpu_named("RTX 3060").fingerprint, True)
    assert not target_for("sm_86", gpu="RTX 3090").present
    assert not target_for("sm_89").present
    # A board of a known name with other multiprocessors is another product: its driver describes it.
    machine_has(here("NVIDIA GeForce RTX 3060", 20, 12 << 30))
    other = target_for("sm_86")
    assert (other.as_dict()["sms"], other.as_dict()["bandwidth_gbps"], other.present) == (20, 500.0, True)


@pytest.mark.parametrize("strategy", ["verify", "optuna", "oracle"])
def test_a_strategy_that_measures_is_refused_where_the_device_is_not(tmp_path: Path, strategy: str) -> None:
    path = tmp_path / "t.db"
    with pytest.raises(DeviceError, match=f"RTX 3090.*not in this machine.*--strategy {strategy} cannot measure"):
        tune([PROBLEM], [64], Options(path, "sm_86", strategy))
    assert not path.exists()


def test_kernels_that_spill_or_cannot_be_launched_are_unfit() -> None:
    target = target_for("sm_86")
    assert target.unfit(PROBLEM, launch(), [counts()]) is None
    assert target.unfit(PROBLEM, launch(), [counts(spill_bytes=24)]) == "spills 24 bytes"
    # 16 warps of 32 lanes with 255 registers are twice the 65,536 that a multiprocessor has.
    reason = target.unfit(PROBLEM, launch(warps=16), [counts(registers=255)])
    assert reason is not None and "65536" in reason


def test_terms_add_up_to_the_prediction() -> None:
    prices = GpuPrices(default_coefficients(default_gpu("sm_86")))
    seen = features(dram_bytes=3e8, l2_bytes=3e8)
    terms = prices.terms_us(seen)
    assert sum(terms.values()) == pytest.approx(predict_us(seen, prices.coefficients))
    assert prices.predict_us([seen])[0] >= prices.transfer_us(seen) == pytest.approx(3e8 / 936e3, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"dram_bytes": 3e8, "footprint_bytes": 3e8}, "memory"),
        ({"dram_bytes": 0.0, "l2_bytes": 3e9, "in_flight_bytes": 1e9}, "the L2 cache"),
        ({"rounds": 1000.0}, "latency"),
        ({"pipes": {**dict.fromkeys(PIPES, 0.0), "heavy": 1e8}}, "instructions"),
        ({"dram_bytes": 1.0, "l2_bytes": 1.0, "chain_instructions": 0.0, "merge_bytes": 1e6}, "launching"),
    ],
)
def test_what_limits_a_call_is_its_largest_term(changes: dict[str, Any], limit: str) -> None:
    assert GpuPrices(default_coefficients(default_gpu("sm_86"))).limit(features(**changes)) == limit


def test_warm_operands_that_fit_the_cache_do_not_come_from_memory() -> None:
    target = target_for("sm_86")
    small, large = features(footprint_bytes=5e6), features(footprint_bytes=7e6)
    assert target.as_timed(small, "warm").dram_bytes == 0  # type: ignore[attr-defined]
    assert target.as_timed(large, "warm") == large
    assert target.as_timed(small, "cold") == small


def test_explanations_have_registers_occupancy_and_what_loops_execute() -> None:
    target = target_for("sm_86")
    told = target.kernel([counts()], target.known_prices(None), features())
    # 64 registers of 128 threads: 8 blocks of 4 warps, 32 of 48 warps.
    assert (told["registers"], told["occupancy"], told["limiter"]) == (64, pytest.approx(32 / 48), "registers")
    assert told["loops"][2] == {
        "loop": "k step", "passes": 2, "instructions": {"dot": 16, "logic": 4}, "unpacking": {"LOP3": 4},
        "int_to_float": 0, "opcodes": {"IDP": 16, "LOP3": 4},
    }  # fmt: skip
    assert told["hot_loop"] == {"loop": "k step", "dot": 16, "int_to_float": 0}
    assert [each["loop"] for each in told["loops"]] == ["outside loops", "tile", "k step"]
    assert target.unpacking([counts()]) == {"k step": {"LOP3": 4}}


@pytest.mark.parametrize(
    ("opcode", "makes_floats"),
    [
        ("I2F.U32.RP", 1), ("I2FP.F32.S32", 1), ("cvt.rn.f32.s32", 1), ("cvt.rn.f16.u8", 1),
        ("F2I.TRUNC", 0), ("HADD2.F32", 0), ("cvt.f32.f16", 0), ("cvt.rzi.s32.f32", 0), ("I2I.S8", 0),
    ],
)  # fmt: skip
def test_conversions_of_integers_to_floats_are_told_apart(opcode: str, makes_floats: int) -> None:
    loop = LoopCounts(K_STEP, 1, {"convert": 1, "dot": 1}, {}, {opcode: 1, "IDP.4A.S8.S8": 1})
    told = target_for("sm_86").kernel([counts(loops=(loop,))], None, features())
    assert told["hot_loop"]["int_to_float"] == told["loops"][0]["int_to_float"] == makes_floats


def test_prices_come_back_from_a_database_and_a_calibration_outweighs_published_figures(tmp_path: Path) -> None:
    gpu = default_gpu("sm_86")
    target = target_for("sm_86")
    seen = features(dram_bytes=3e8)
    with Store.open(tmp_path / "t.db") as store:
        store.put_device(target.fingerprint, target.as_dict())
        published = stored_prices(store, target.fingerprint, 1)
        assert isinstance(published, GpuPrices)
        assert published.coefficients == default_coefficients(gpu)
        assert published.restored(seen.as_dict()) == seen
        slower = default_coefficients(gpu)
        slower.values["dram_share"] = 0.5
        store.put_calibration(target.fingerprint, 1, slower.as_dict(), "t")
        for prices in (stored_prices(store, target.fingerprint, 1), target.known_prices(store)):
            assert prices is not None
            assert prices.predict_us([seen])[0] > published.predict_us([seen])[0]
        store.put_calibration(target.fingerprint, 1, {"form": GPU}, "t")
        assert stored_prices(store, target.fingerprint, 1) == published


def test_a_cpu_that_is_not_described_has_no_prices(tmp_path: Path) -> None:
    with Store.open(tmp_path / "t.db") as store:
        assert stored_prices(store, "elsewhere", 1) is None
        store.put_device(detect().fingerprint, detect().as_dict())
        assert stored_prices(store, detect().fingerprint, 1) is None


def test_another_instruction_set_is_looked_at_and_not_run() -> None:
    target = target_for("cpu", isa="generic")
    assert isinstance(target, CpuTarget)
    assert (target.backend.target(), target.isa) == ("generic", "generic")
    assert target.present == (detect().isa == "generic")
    with pytest.raises(DeviceError, match="mmx"):
        target_for("cpu", isa="mmx")
