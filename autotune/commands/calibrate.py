"""`autotune calibrate`: fit the cost model to this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .. import options
from ..output import print_facts, print_json, print_table
from ..progress import progress_on

if TYPE_CHECKING:
    from ...costmodel.calibrate import Calibration


@click.command()
@options.device_option
@options.threads_option
@options.database_option
@options.json_option
def calibrate(device: str, threads: int | None, database: Path | None, as_json: bool) -> None:
    """Fit the cost model's coefficients to a device, within a minute.

    Times microbenchmarks, which are not the operators that are ranked later, and stores coefficients and residuals.
    Tuning calibrates by itself when the database has no calibration for the device and thread count.

    \b
    Example:
      autotune calibrate --device cpu --threads 2 --db lowbit.db
    """
    backend = options.backend_for(device)
    path = options.database_for_tuning(database)
    from ...costmodel.calibrate import calibrate as measure_and_fit
    from ...costmodel.device import detect
    from ...db.store import Store

    machine = detect()
    count = threads or machine.cores
    with Store.open(path, mode="tune") as store:
        with progress_on(sys.stderr) as progress:
            progress.update("calibrating", 0, None, f"{machine.description}, {count} threads")
            calibration = measure_and_fit(machine, count)
        store.put_device(machine.fingerprint, machine.as_dict())
        store.put_calibration(machine.fingerprint, count, calibration.as_dict(), backend.toolchain())
    if as_json:
        print_json({"db": str(path), **calibration.as_dict()})
    else:
        _print(calibration, path)


def _print(calibration: Calibration, path: Path) -> None:
    print_facts(
        "Calibration",
        {
            "device": calibration.device.description,
            "threads": calibration.threads,
            "seconds": calibration.seconds,
            "noise": calibration.noise,
            "fork us": calibration.fork_us,
            "fork us, threads asleep": calibration.parked_us,
            "stored in": str(path),
        },
    )
    points = calibration.bandwidth.points
    named = [(p.level, p.threads, f"{p.working_set_bytes / 1024:.0f}", f"{p.gbps:.1f}") for p in points if p.level]
    print_table("Read bandwidth", ("level", ">threads", ">working set KiB", ">GB/s"), named)
    for fit in (calibration.two_term, calibration.extended):
        residual = {"median residual": fit.residual.median, "p95 residual": fit.residual.p95}
        print_facts(f"Form {fit.form}", {**fit.values, **residual})
