"""Which GPU an architecture stands for: the one that is named, the one that is here, or its most common board."""

from __future__ import annotations

from contextlib import suppress

from ..kernels.cuda.gpus import GpuHere, gpus_here
from ..kernels.errors import DeviceError
from .gpu import Gpu, default_gpu, described_gpu, gpu_named


def profile_here(here: GpuHere) -> Gpu:
    """The profile of a GPU in this machine: its board's, or what its driver reports if there is none.

    A board of the same name with other multiprocessors or memory is another product.

    Raises
    ------
    DeviceError
        If its architecture has no profile.
    """
    known: Gpu | None = None
    with suppress(DeviceError):
        known = gpu_named(here.name, here.arch)
    if known is not None and known.sms == here.sms and 0.85 < here.memory_bytes / known.memory_bytes < 1.15:
        return known
    return described_gpu(
        here.name,
        here.arch,
        sms=here.sms,
        clock_mhz=round(here.clock_mhz),
        bandwidth_gbps=here.bandwidth_gbps,
        memory_bytes=here.memory_bytes,
        l2_bytes=here.l2_bytes,
    )


def chosen_gpu(arch: str, name: str | None) -> tuple[Gpu, GpuHere | None, str]:
    """What to tune for.

    Parameters
    ----------
    arch : str
    name : str or None
        A board of that architecture.

    Returns
    -------
    gpu : Gpu
    here : GpuHere or None
        The same in this machine, if it is.
    how : str
        How it was chosen, for people.

    Raises
    ------
    DeviceError
        If the board is unknown or of another architecture.
    """
    present = [(profile_here(each), each) for each in gpus_here() if each.arch == arch]
    if name is None and present:
        return *present[0], "in this machine"
    gpu = default_gpu(arch) if name is None else gpu_named(name, arch)
    here = next((each for profile, each in present if profile.fingerprint == gpu.fingerprint), None)
    how = "as asked" if name is not None else f"the most common board of {arch}; --gpu names another"
    return gpu, here, how
