"""What a device is, read from trees of files written for the purpose and from this machine."""

import json
import platform
import re
from dataclasses import replace

import pytest
from lowbit.costmodel import device as module
from lowbit.costmodel.device import (
    ASSUMED_CACHES,
    CacheLevel,
    Device,
    Identity,
    detect,
    read_caches,
    read_identity,
    read_quota,
    read_siblings,
)
from lowbit.kernels.cpu.pool import pinned

ZEN3 = Device(
    machine="x86_64",
    identity=Identity("AuthenticAMD", "25", "1", "1", "AMD EPYC"),
    isa="avx2",
    simd=("avx2", "fma"),
    cores=1,
    machine_cores=2,
    line_bytes=64,
    caches=(CacheLevel(1, 32 << 10, 1), CacheLevel(2, 512 << 10, 1), CacheLevel(3, 32 << 20, 2)),
    memory_bytes=24 << 30,
)

X86_CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Some Marketing Name @ 2.00GHz
stepping\t: 8

processor\t: 1
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 999
"""

ARM_CPUINFO = """processor\t: 0
BogoMIPS\t: 243.75
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1
"""


def write_cpu(root, number, siblings, caches):
    cpu = root / f"cpu{number}"
    (cpu / "topology").mkdir(parents=True)
    (cpu / "topology/thread_siblings_list").write_text(f"{siblings}\n")
    for index, (level, kind, size, shared) in enumerate(caches):
        entry = cpu / "cache" / f"index{index}"
        entry.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
            (entry / name).write_text(f"{text}\n")
        (entry / "coherency_line_size").write_text("64\n")


def test_fingerprint_reads_as_documented():
    assert ZEN3.fingerprint == "x86_64-AuthenticAMD-25-1-1-avx2-2c-L1:32K-L2:512K-L3:32M"


def test_fingerprint_depends_on_silicon_alone():
    marketing = replace(ZEN3, identity=replace(ZEN3.identity, name="Other"), cores=2, memory_bytes=1, simd=())
    assert marketing.fingerprint == ZEN3.fingerprint
    others = [
        replace(ZEN3, isa="generic"),
        replace(ZEN3, machine_cores=4),
        replace(ZEN3, caches=ZEN3.caches[:2]),
        replace(ZEN3, identity=replace(ZEN3.identity, stepping="2")),
        replace(ZEN3, assumed=("caches",)),
    ]
    assert len({ZEN3.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_description_is_for_people():
    assert ZEN3.description == "AMD EPYC, 1 of 2 cores, avx2, L1 32KiB, L2 512KiB, L3 32MiB"


def test_json_round_trip():
    assert Device.from_dict(json.loads(json.dumps(ZEN3.as_dict()))) == ZEN3


def test_this_machine_is_stable_and_well_formed():
    first = detect()
    with pinned():
        assert detect() == first
    assert re.fullmatch(r"[\w.:~-]+", first.fingerprint)
    assert f"-{first.isa}-{first.machine_cores}c-L1:" in first.fingerprint
    assert 1 <= first.cores <= first.machine_cores
    sizes = [cache.size_bytes for cache in first.caches]
    assert sizes == sorted(sizes) and sizes[0] >= 8 << 10
    assert first.line_bytes in (32, 64, 128, 256)


def test_caches_of_a_tree_with_two_threads_a_core(tmp_path):
    caches = [
        (1, "Data", "48K", "0,2"),
        (1, "Instruction", "32K", "0,2"),
        (2, "Unified", "2048K", "0,2"),
        (3, "Unified", "30M", "0-3"),
    ]
    for number, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        write_cpu(tmp_path, number, siblings, caches)
    found, line = read_caches(tmp_path)
    assert found == (CacheLevel(1, 48 << 10, 1), CacheLevel(2, 2 << 20, 1), CacheLevel(3, 30 << 20, 2))
    assert line == 64
    assert len(set(read_siblings(tmp_path).values())) == 2


def test_the_lowest_cpu_counts_and_ten_is_above_nine(tmp_path):
    write_cpu(tmp_path, 10, "10", [(1, "Data", "64K", "10")])
    write_cpu(tmp_path, 9, "9", [(1, "Data", "32K", "9")])
    assert read_caches(tmp_path)[0] == (CacheLevel(1, 32 << 10, 1),)


@pytest.mark.parametrize("size", ["", "unknown", "0K", "-4K"])
def test_an_unreadable_first_level_means_no_caches(tmp_path, size):
    write_cpu(tmp_path, 0, "0", [(1, "Data", size, "0"), (2, "Unified", "1M", "0")])
    assert read_caches(tmp_path) == ((), 64)


def test_malformed_sharing_counts_as_private(tmp_path):
    write_cpu(tmp_path, 0, "0", [(1, "Data", "32K", "all of them")])
    assert read_caches(tmp_path)[0] == (CacheLevel(1, 32 << 10, 1),)


def test_nothing_mounted(tmp_path):
    assert read_caches(tmp_path) == ((), 0)
    assert read_siblings(tmp_path) == {}


@pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere the system is asked by other means")
def test_detection_without_proc_and_sys_assumes_and_says_so(tmp_path):
    bare = detect(tmp_path)
    assert bare.assumed == ("caches", "line")
    assert (bare.caches, bare.line_bytes) == (ASSUMED_CACHES, 64)
    assert bare.fingerprint.endswith("-L1:32K~-L2:512K~")
    assert "(assumed)" in bare.description


def test_x86_identity_is_the_first_processors():
    assert read_identity(X86_CPUINFO) == Identity("GenuineIntel", "6", "143", "8", "Some Marketing Name @ 2.00GHz")


def test_arm_identity_is_implementer_part_variant_revision():
    assert read_identity(ARM_CPUINFO) == Identity("0x41", "0xd0c", "0x3", "1", "")


def test_arm_fingerprint():
    arm = replace(ZEN3, machine="aarch64", identity=read_identity(ARM_CPUINFO), isa="neon_dot", caches=ASSUMED_CACHES)
    assert arm.fingerprint == "aarch64-0x41-0xd0c-0x3-1-neon_dot-2c-L1:32K-L2:512K"


def test_windows_identity(monkeypatch):
    monkeypatch.setattr(module.platform, "system", lambda: "Windows")
    monkeypatch.setattr(module.platform, "processor", lambda: "Intel64 Family 6 Model 158 Stepping 10, GenuineIntel")
    who = read_identity("")
    assert (who.vendor, who.family, who.model, who.stepping) == ("GenuineIntel", "6", "158", "10")


def test_mac_identity_and_caches(monkeypatch):
    answers = {"hw.cpufamily": "458787763", "machdep.cpu.brand_string": "Apple M1", "hw.l1dcachesize": "65536"}
    answers |= {"hw.l2cachesize": "4194304", "hw.cachelinesize": "128"}
    monkeypatch.setattr(module.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(module, "_sysctl", lambda name: answers.get(name, ""))
    assert read_identity("") == Identity("Apple", "458787763", "", "", "Apple M1")
    assert module._darwin_caches() == ((CacheLevel(1, 64 << 10, 1), CacheLevel(2, 4 << 20, 1)), 128)


@pytest.mark.parametrize(("text", "cores"), [("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1)])
def test_container_quota(tmp_path, text, cores):
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{text}\n")
    assert read_quota(tmp_path) == cores


@pytest.mark.parametrize("text", ["max 100000", "", "nonsense", "0 0"])
def test_no_container_quota(tmp_path, text):
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(text)
    assert read_quota(tmp_path) > 4096


def test_first_version_of_control_groups(tmp_path):
    group = tmp_path / "sys/fs/cgroup/cpu"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("300000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert read_quota(tmp_path) == 3
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert read_quota(tmp_path) > 4096
