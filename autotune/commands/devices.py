"""`autotune devices`: what can be tuned for, here or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..options import json_option
from ..output import print_json, print_table

if TYPE_CHECKING:
    from ...costmodel.device import Device
    from ...costmodel.gpu import Gpu
    from ...kernels.cuda.gpus import GpuHere


@click.command()
@json_option
def devices(as_json: bool) -> None:
    """List the devices of this machine, and the GPUs that can be tuned for without one.

    The name of a device is what --device takes; of an architecture's boards --gpu takes the name.

    \b
    Example:
      autotune devices --json
    """
    from ...costmodel.device import detect
    from ...costmodel.gpu import architectures, default_gpu, gpus
    from ...costmodel.gpu_here import profile_here
    from ...kernels.cuda.gpus import gpus_here

    device = detect()
    here = [(each, profile_here(each)) for each in gpus_here() if each.arch in architectures()]
    listed = {arch: (default_gpu(arch), gpus(arch)) for arch in architectures()}
    if as_json:
        present = [
            {**gpu.as_dict(), "name": each.arch, "board": gpu.name, "here": each.as_dict()} for each, gpu in here
        ]
        known = [
            {"name": arch, "default": default.name, "boards": [board.as_dict() for board in boards]}
            for arch, (default, boards) in listed.items()
        ]
        print_json({"devices": [{"name": "cpu", **device.as_dict()}, *present], "architectures": known})
        return
    print_table("Devices of this machine", ("property", "value"), _cpu(device))
    for each, gpu in here:
        print_table(f"GPU {each.ordinal}", ("property", "value"), _gpu(each, gpu))
    rows = [
        (arch, default.name, ", ".join(board.name for board in boards if board.name != default.name))
        for arch, (default, boards) in listed.items()
    ]
    print_table("GPUs that need not be here", ("--device", "stands for", "--gpu takes too"), rows)


def _cpu(device: Device) -> list[tuple[str, str]]:
    caches = ", ".join(
        f"L{cache.level} {cache.size_bytes // 1024} KiB"
        + (f" shared by {cache.shared_by} cores" if cache.shared_by > 1 else "")
        for cache in device.caches
    )
    return [
        ("name", "cpu"),
        ("description", device.description),
        ("fingerprint", device.fingerprint),
        ("instruction set", device.isa),
        ("cores", f"{device.cores} of {device.machine_cores}"),
        ("cache line", f"{device.line_bytes} bytes"),
        ("caches", caches),
    ]


def _gpu(here: GpuHere, gpu: Gpu) -> list[tuple[str, str]]:
    return [
        ("name", here.arch),
        ("description", gpu.description),
        ("fingerprint", gpu.fingerprint),
        ("driver's name", here.name),
        ("driver serves CUDA", here.driver),
    ]
