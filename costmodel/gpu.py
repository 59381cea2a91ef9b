"""GPUs as the cost model sees them: profiles of named boards, which need no GPU in this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any, Self

from ..kernels.errors import DeviceError
from .gpu_architectures import ARCHITECTURES, Architecture
from .gpu_boards import BOARDS, DEFAULTS, Board

_DRIVER = "reported by the driver"
_MAKERS = ("nvidia", "geforce", "tesla", "quadro", "graphics", "gpu")


@dataclass(frozen=True)
class Gpu:
    """A board: its own figures and those of its architecture.

    Throughputs are lanes a clock and multiprocessor; the architecture's figures are told of at
    `lowbit.costmodel.gpu_architectures.Architecture`.

    Attributes
    ----------
    name : str
        ``RTX 3090``.
    arch : str
        ``sm_86``.
    sms : int
        Multiprocessors.
    clock_mhz : int
        Boost clock.
    bandwidth_gbps : float
        Memory bandwidth, decimal gigabytes a second.
    memory_bytes, l2_bytes : int
    l2_gbps : float
        What the L2 cache delivers to all multiprocessors at the boost clock.
    tdp_w : int
        Power limit in watts; 0 if unknown.
    sources : dict of str to str
        Where each figure is published, or ``estimate: …``; not part of equality.
    """

    name: str
    arch: str
    sms: int
    clock_mhz: int
    bandwidth_gbps: float
    memory_bytes: int
    l2_bytes: int
    l2_gbps: float
    tdp_w: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    shared_reserved_bytes: int
    shared_granularity_bytes: int
    l1_bytes: int
    registers_per_sm: int
    register_granularity: int
    max_registers_per_thread: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    schedulers: int
    fp32_per_clock: int
    int32_per_clock: int
    logic_per_clock: int
    dp4a_per_clock: int
    convert_per_clock: int
    special_per_clock: int
    shuffle_per_clock: int
    load_store_lanes: int
    l1_bytes_per_clock: int
    dram_latency_ns: float
    l2_latency_ns: float
    sources: dict[str, str] = field(compare=False)

    @property
    def fingerprint(self) -> str:
        """Stable key of the silicon, without its marketing name: ``sm_86-82sm-1695MHz-936GBps-L2:6M``."""
        return f"{self.arch}-{self.sms}sm-{self.clock_mhz}MHz-{self.bandwidth_gbps:.0f}GBps-L2:{_binary(self.l2_bytes)}"

    @property
    def description(self) -> str:
        """For people: name, architecture, multiprocessors, clock, bandwidth and L2 cache."""
        return (
            f"{self.name} ({self.arch}), {self.sms} multiprocessors at {self.clock_mhz} MHz, "
            f"{self.bandwidth_gbps:.0f} GB/s, L2 {self.l2_bytes / (1 << 20):.4g} MiB"
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` is the inverse."""
        return asdict(self) | {"fingerprint": self.fingerprint, "description": self.description}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        values = {each.name: data[each.name] for each in fields(cls)}
        return cls(**{**values, "sources": dict(values["sources"])})


def architectures() -> tuple[str, ...]:
    """Every architecture that has a profile, oldest first."""
    return tuple(ARCHITECTURES)


def gpus(arch: str | None = None) -> tuple[Gpu, ...]:
    """Every board, or every one of an architecture.

    Raises
    ------
    DeviceError
        If the architecture has no profile.
    """
    if arch is not None:
        check_arch(arch)
    return tuple(_profile(board) for board in BOARDS if arch in (None, board.arch))


def check_arch(arch: str) -> str:
    """Return ``arch`` if it has a profile, else raise `DeviceError` with the list."""
    if arch not in ARCHITECTURES:
        raise DeviceError(f"unknown GPU architecture {arch!r}: choose one of {', '.join(ARCHITECTURES)}")
    return arch


def default_gpu(arch: str) -> Gpu:
    """The board that a bare architecture stands for; see `lowbit.costmodel.gpu_boards.DEFAULTS`.

    Raises
    ------
    DeviceError
        If the architecture has no profile.
    """
    return gpu_named(DEFAULTS[check_arch(arch)])


def gpu_named(name: str, arch: str | None = None) -> Gpu:
    """A board by name, whatever its case, spaces and maker: ``RTX 3090``, ``rtx3090``, ``NVIDIA GeForce RTX 3090``.

    A part that only one board's name has is enough: ``3060``.

    Parameters
    ----------
    name : str
        The driver's names are understood too. Of names that several boards share (``A100``) one is taken; its
        `Gpu.name` says which.
    arch : str, optional
        The architecture that it has to be of.

    Raises
    ------
    DeviceError
        If no board has that name, or it is of another architecture.
    """
    if arch is not None:
        check_arch(arch)
    board = _by_name().get(_plain(name)) or _only_board_with(_plain(name), arch)
    if board is None:
        known = ", ".join(each.name for each in BOARDS if arch in (None, each.arch))
        raise DeviceError(f"unknown GPU {name!r}: choose one of {known}")
    if arch not in (None, board.arch):
        known = ", ".join(each.name for each in BOARDS if each.arch == arch)
        raise DeviceError(f"{board.name} is {board.arch}, not {arch}: choose one of {known}")
    return _profile(board)


def _only_board_with(part: str, arch: str | None) -> Board | None:
    """The board of the architecture whose name has ``part``, if it is the only one and the part is not too short."""
    found = [board for board in BOARDS if arch in (None, board.arch) and part in _plain(board.name)]
    return found[0] if len(found) == 1 and len(part) > 1 else None


def described_gpu(
    name: str,
    arch: str,
    *,
    sms: int,
    clock_mhz: int,
    bandwidth_gbps: float,
    memory_bytes: int,
    l2_bytes: int,
    tdp_w: int = 0,
) -> Gpu:
    """A board that has no profile of its own, from what its driver reports and its architecture's figures.

    Raises
    ------
    DeviceError
        If the architecture has no profile.
    """
    like = default_gpu(arch)
    rate = like.l2_gbps / like.clock_mhz * 1e3 * sms / like.sms
    sources = {**dict.fromkeys(_BOARD_FIGURES, _DRIVER)} | {
        "l2_gbps": f"estimate: a multiprocessor's share of the {like.name}'s, times {sms}, at this board's clock"
    }
    board = Board(name, arch, sms, clock_mhz, bandwidth_gbps, memory_bytes, l2_bytes, rate, tdp_w, sources)
    return _profile(board)


_BOARD_FIGURES = ("sms", "clock_mhz", "bandwidth_gbps", "memory_bytes", "l2_bytes", "l2_gbps", "tdp_w")


def _profile(board: Board) -> Gpu:
    architecture = ARCHITECTURES[board.arch]
    own = {name: board.sources.get(name) or board.sources.get("specification", "") for name in _BOARD_FIGURES}
    shared = {each.name: getattr(architecture, each.name) for each in fields(Architecture)}
    del shared["sources"]
    return Gpu(
        name=board.name,
        sms=board.sms,
        clock_mhz=board.clock_mhz,
        bandwidth_gbps=float(board.bandwidth_gbps),
        memory_bytes=board.memory_bytes,
        l2_bytes=board.l2_bytes,
        l2_gbps=board.l2_bytes_per_clock * board.clock_mhz * 1e-3,
        tdp_w=board.tdp_w,
        sources={**architecture.sources, **own},
        **shared,
    )


@lru_cache(maxsize=1)
def _by_name() -> dict[str, Board]:
    return {_plain(name): board for board in BOARDS for name in (board.name, *board.aliases)}


def _plain(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return "".join(word for word in words if word not in _MAKERS)


def _binary(size_bytes: int) -> str:
    for shift, unit in ((20, "M"), (10, "K")):
        if size_bytes % (1 << shift) == 0:
            return f"{size_bytes >> shift}{unit}"
    return str(size_bytes)
