"""`autotune devices`: what this machine can be tuned for."""

from __future__ import annotations

import click

from ..options import json_option
from ..output import print_json, print_table


@click.command()
@json_option
def devices(as_json: bool) -> None:
    """List the devices of this machine that can be tuned for.

    \b
    Example:
      autotune devices --json
    """
    from ...costmodel.device import detect

    device = detect()
    if as_json:
        print_json({"devices": [{"name": "cpu", **device.as_dict()}]})
        return
    caches = ", ".join(
        f"L{cache.level} {cache.size_bytes // 1024} KiB"
        + (f" shared by {cache.shared_by} cores" if cache.shared_by > 1 else "")
        for cache in device.caches
    )
    rows = [
        ("name", "cpu"),
        ("description", device.description),
        ("fingerprint", device.fingerprint),
        ("instruction set", device.isa),
        ("cores", f"{device.cores} of {device.machine_cores}"),
        ("cache line", f"{device.line_bytes} bytes"),
        ("caches", caches),
    ]
    print_table("Devices", ("property", "value"), rows)
