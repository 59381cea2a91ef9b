"""Profiles of GPUs: names are found however they are written, unknown ones refused with the list."""

import json
import re

import pytest
from lowbit.costmodel.gpu import (
    Gpu,
    architectures,
    check_arch,
    default_gpu,
    described_gpu,
    gpu_named,
    gpus,
)
from lowbit.kernels.errors import DeviceError


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX 3090", "RTX 3090"),
        ("rtx3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("  Rtx-3090 ", "RTX 3090"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("Orin", "Jetson AGX Orin 64GB"),
    ],
)
def test_a_board_is_found_by_any_of_its_names(written, name):
    assert gpu_named(written).name == name


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_names_are_unambiguous(gpu):
    assert gpu_named(gpu.name) == gpu
    assert gpu_named(f"NVIDIA {gpu.name.upper()}", gpu.arch) == gpu


def test_a_part_of_a_name_is_enough_if_one_board_alone_has_it():
    assert gpu_named("3060").name == gpu_named("3060", "sm_86").name == "RTX 3060"
    assert gpu_named("6000 Blackwell").name == "RTX PRO 6000 Blackwell"
    for ambiguous in ("RTX 3", "RTX", "0"):
        with pytest.raises(DeviceError, match=f"unknown GPU '{ambiguous}'"):
            gpu_named(ambiguous)


def test_an_unknown_board_is_refused_with_the_list():
    with pytest.raises(DeviceError, match=r"unknown GPU 'RTX 9999'.*RTX 3090.*H200"):
        gpu_named("RTX 9999")
    with pytest.raises(DeviceError, match=r"unknown GPU 'RTX 9999': choose one of RTX 3090, RTX 3080") as refused:
        gpu_named("RTX 9999", "sm_86")
    assert "H200" not in str(refused.value)


def test_a_board_of_another_architecture_is_refused():
    with pytest.raises(DeviceError, match=r"RTX 4090 is sm_89, not sm_86: choose one of RTX 3090"):
        gpu_named("RTX 4090", "sm_86")


@pytest.mark.parametrize("call", [check_arch, default_gpu, gpus, lambda arch: gpu_named("T4", arch)])
def test_an_unknown_architecture_is_refused_with_the_list(call):
    with pytest.raises(DeviceError, match=r"'sm_61': choose one of sm_75, sm_80, sm_86, sm_87, sm_89, sm_90, sm_100"):
        call("sm_61")


@pytest.mark.parametrize("arch", architectures())
def test_every_architecture_has_a_default_board(arch):
    assert default_gpu(arch).arch == arch
    assert default_gpu(arch) in gpus(arch)


def test_all_architectures_that_kernels_are_compiled_for_have_a_profile():
    assert architectures() == ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120")


def test_the_fingerprint_names_silicon_and_not_the_market():
    gpu = gpu_named("RTX 3090")
    assert gpu.fingerprint == "sm_86-82sm-1695MHz-936GBps-L2:6M"
    # The same silicon in two form factors is one key.
    assert gpu_named("A100 PCIe 40GB").fingerprint == gpu_named("A100 SXM 40GB").fingerprint
    assert gpu_named("RTX 3060").fingerprint.endswith("L2:2304K")


def test_the_description_names_the_board():
    assert gpu_named("T4").description == "T4 (sm_75), 40 multiprocessors at 1590 MHz, 320 GB/s, L2 4 MiB"


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_profiles_survive_json(gpu):
    restored = Gpu.from_dict(json.loads(json.dumps(gpu.as_dict())))
    assert restored == gpu
    assert restored.sources == gpu.sources
    assert hash(restored) == hash(gpu)


def test_a_board_without_a_profile_takes_its_architectures_figures():
    gpu = described_gpu(
        "GeForce RTX 3070", "sm_86", sms=46, clock_mhz=1725, bandwidth_gbps=448, memory_bytes=8 << 30, l2_bytes=4 << 20
    )
    like = default_gpu("sm_86")
    assert gpu.shared_bytes_per_sm == like.shared_bytes_per_sm
    assert gpu.fp32_per_clock == like.fp32_per_clock
    assert gpu.l2_gbps == pytest.approx(like.l2_gbps * 46 / 82 * 1725 / 1695)
    assert gpu.fingerprint == "sm_86-46sm-1725MHz-448GBps-L2:4M"
    assert set(gpu.sources) == set(like.sources)
    assert re.match(r"estimate: ", gpu.sources["l2_gbps"])
