"""What the silicon is: the identity that tuned results are stored under, and the sizes that the model needs."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

# fmt: off
_SIMD = (
    "sse4.2", "avx", "avx2", "fma", "f16c", "avxvnni", "avxvnniint8", "avx512f", "avx512bw", "avx512vl", "avx512vnni",
    "avx512vbmi", "avx512bf16", "avx512fp16", "amx-int8", "neon", "fullfp16", "dotprod", "i8mm", "bf16", "sve", "sve2",
)
# fmt: on


@dataclass(frozen=True)
class CacheLevel:
    """One data or unified cache.

    Attributes
    ----------
    level : int
        1 is nearest to the core.
    size_bytes : int
        Of one instance.
    shared_by : int
        Physical cores that share one instance.
    """

    level: int
    size_bytes: int
    shared_by: int


ASSUMED_LINE_BYTES = 64
ASSUMED_CACHES = (CacheLevel(1, 32 << 10, 1), CacheLevel(2, 512 << 10, 1))
"""Where the system tells nothing: the smallest that common server, desktop and mobile cores have, and no third level,
so that a working set is rather priced as coming from memory than from a cache that is not there."""


@dataclass(frozen=True)
class Identity:
    """Who made the core: CPUID's fields on x86, MIDR's (implementer, part, variant, revision) on Arm."""

    vendor: str
    family: str
    model: str
    stepping: str
    name: str = ""


@dataclass(frozen=True)
class Device:
    """A CPU as the cost model sees it.

    Attributes
    ----------
    machine : str
        ``x86_64`` or ``aarch64``.
    identity : Identity
    isa : str
        Instruction set that kernels are compiled for (``avx2``).
    simd : tuple of str
        The host's vector features, in LLVM's words.
    cores : int
        Physical cores that this process may use: affinity and a container's quota respected.
    machine_cores : int
        Physical cores of the machine.
    line_bytes : int
    caches : tuple of CacheLevel
        Nearest first.
    memory_bytes : int
    assumed : tuple of str
        What could not be read and holds a documented default: ``caches``, ``line``.
    """

    machine: str
    identity: Identity
    isa: str
    simd: tuple[str, ...]
    cores: int
    machine_cores: int
    line_bytes: int
    caches: tuple[CacheLevel, ...]
    memory_bytes: int
    assumed: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Stable key, such as ``x86_64-AuthenticAMD-25-1-1-avx2-2c-L1:32K-L2:512K-L3:32M``.

        Holds what the silicon is and nothing that a process's affinity, a container or a marketing name changes.
        Assumed cache sizes end in ``~``.
        """
        who = self.identity
        doubt = "~" if "caches" in self.assumed else ""
        parts = [self.machine, who.vendor, who.family, who.model, who.stepping, self.isa, f"{self.machine_cores}c"]
        parts += [f"L{cache.level}:{_binary(cache.size_bytes)}{doubt}" for cache in self.caches]
        return "-".join(re.sub(r"[^\w.:~]+", "_", part) for part in parts if part)

    @property
    def description(self) -> str:
        """For people: the marketing name, cores, instruction set and caches."""
        who = self.identity
        name = who.name or " ".join(part for part in (who.vendor, who.family, who.model) if part) or self.machine
        caches = ", ".join(f"L{cache.level} {_binary(cache.size_bytes)}iB" for cache in self.caches)
        doubt = " (assumed)" if "caches" in self.assumed else ""
        return f"{name}, {self.cores} of {self.machine_cores} cores, {self.isa}, {caches}{doubt}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` is the inverse."""
        return asdict(self) | {"fingerprint": self.fingerprint, "description": self.description}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        fields = {key: value for key, value in data.items() if key not in ("fingerprint", "description")}
        fields["identity"] = Identity(**fields["identity"])
        fields["caches"] = tuple(CacheLevel(**cache) for cache in fields["caches"])
        fields["simd"], fields["assumed"] = tuple(fields["simd"]), tuple(fields["assumed"])
        return cls(**fields)


def detect(root: Path = Path("/")) -> Device:
    """The CPU that this process runs on.

    Parameters
    ----------
    root : Path
        Where ``proc`` and ``sys`` are mounted. A file that is missing or malformed leaves a documented default, listed
        in `Device.assumed`, or an empty identity field.

    Raises
    ------
    DeviceError
        If the environment asks for an instruction set that this machine lacks.
    """
    import llvmlite.binding as llvm
    import psutil

    from ..kernels.cpu.isa import detect as detect_isa
    from ..kernels.cpu.pool import allowed_cpus

    features = llvm.get_host_cpu_features()
    cpus = root / "sys/devices/system/cpu"
    caches, line_bytes = read_caches(cpus)
    if not caches and platform.system() == "Darwin":
        caches, line_bytes = _darwin_caches()
    assumed = tuple(name for name, known in (("caches", caches), ("line", line_bytes)) if not known)
    siblings = read_siblings(cpus)
    machine_cores = len(set(siblings.values())) or psutil.cpu_count(logical=False) or os.cpu_count() or 1
    usable = len({siblings.get(cpu, str(cpu)) for cpu in allowed_cpus()})
    return Device(
        machine={"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine()),
        identity=read_identity(_text(root / "proc/cpuinfo")),
        isa=detect_isa().name,
        simd=tuple(name for name in _SIMD if features.get(name)),
        cores=max(min(usable, machine_cores, read_quota(root)), 1),
        machine_cores=machine_cores,
        line_bytes=line_bytes or ASSUMED_LINE_BYTES,
        caches=caches or ASSUMED_CACHES,
        memory_bytes=int(psutil.virtual_memory().total),
        assumed=assumed,
    )


def read_caches(cpus: Path) -> tuple[tuple[CacheLevel, ...], int]:
    """Data and unified caches of the lowest-numbered CPU under Linux's ``/sys/devices/system/cpu``, and the line size.

    Returns
    -------
    caches : tuple of CacheLevel
        Empty unless at least a first level is described completely.
    line_bytes : int
        0 if unknown.
    """
    cpu = min(cpus.glob("cpu[0-9]*"), key=lambda path: int(path.name[3:]), default=cpus / "cpu0")
    ways = max(_count(_text(cpu / "topology/thread_siblings_list")), 1)
    found: dict[int, CacheLevel] = {}
    lines = []
    for index in sorted(cpu.glob("cache/index[0-9]*")):
        size = re.fullmatch(r"(\d+)([KMG]?)", _text(index / "size"))
        level = _text(index / "level")
        if _text(index / "type") not in ("Data", "Unified") or size is None or not level.isdigit():
            continue
        size_bytes = int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]]
        sharing = max(_count(_text(index / "shared_cpu_list")) // ways, 1)
        if size_bytes:
            found[int(level)] = CacheLevel(int(level), size_bytes, sharing)
        line = _text(index / "coherency_line_size")
        lines += [int(line)] if line.isdigit() else []
    caches = tuple(found[level] for level in sorted(found))
    return (caches if 1 in found else ()), max(lines, default=0)


def read_siblings(cpus: Path) -> dict[int, str]:
    """Each online CPU's physical core, named by the list of CPUs that share it; empty where nothing tells."""
    siblings = {}
    for cpu in cpus.glob("cpu[0-9]*"):
        core = _text(cpu / "topology/thread_siblings_list")
        if core:
            siblings[int(cpu.name[3:])] = core
    return siblings


def read_identity(cpuinfo: str) -> Identity:
    """Identity from the text of ``/proc/cpuinfo``, x86 or Arm; from Python's platform module if it is empty."""
    first: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            first.setdefault(key.strip(), value.strip())
    get = first.get
    if "vendor_id" in first:
        return Identity(
            get("vendor_id", ""), get("cpu family", ""), get("model", ""), get("stepping", ""), get("model name", "")
        )
    if "CPU implementer" in first:
        implementer, part, variant, revision = (
            get(f"CPU {name}", "") for name in ("implementer", "part", "variant", "revision")
        )
        return Identity(implementer, part, variant, revision, get("model name", get("Hardware", "")))
    if platform.system() == "Darwin":
        keys = ("machdep.cpu.vendor", "hw.cpufamily", "machdep.cpu.model", "machdep.cpu.stepping")
        vendor, family, model, stepping = (_sysctl(key) for key in keys)
        return Identity(vendor or "Apple", family, model, stepping, _sysctl("machdep.cpu.brand_string"))
    windows = re.search(r"Family (\d+) Model (\d+) Stepping (\d+), (\w+)", platform.processor())
    if windows:
        return Identity(windows[4], windows[1], windows[2], windows[3], platform.processor())
    return Identity(platform.processor(), "", "", "", platform.processor())


def read_quota(root: Path) -> int:
    """Whole cores that a container's CPU quota (cgroup version 2 or 1) leaves, rounded up; huge without a quota."""
    quota, _, period = _text(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if not quota:
        quota = _text(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period = _text(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit() and int(quota) and int(period):
        return -(-int(quota) // int(period))
    return 1 << 30


def _darwin_caches() -> tuple[tuple[CacheLevel, ...], int]:
    def size(name: str) -> int:
        value = _sysctl(name)
        return int(value) if value.isdigit() else 0

    sizes = ((1, size("hw.l1dcachesize")), (2, size("hw.l2cachesize")), (3, size("hw.l3cachesize")))
    return tuple(CacheLevel(level, each, 1) for level, each in sizes if each), size("hw.cachelinesize")


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _count(cpu_list: str) -> int:
    """Number of CPUs in a list like ``0-3,8``; 0 if malformed."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", cpu_list):
        return 0
    ranges = (part.split("-") for part in cpu_list.split(","))
    return sum(int(bounds[-1]) - int(bounds[0]) + 1 for bounds in ranges)


def _binary(size_bytes: int) -> str:
    """``32K``, ``32M``; the largest unit that divides."""
    for shift, unit in ((30, "G"), (20, "M"), (10, "K")):
        if size_bytes and size_bytes % (1 << shift) == 0:
            return f"{size_bytes >> shift}{unit}"
    return str(size_bytes)
