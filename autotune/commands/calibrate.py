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
@options.gpu_option
@options.threads_option
@options.database_option
@options.json_option
def calibrate(device: str, gpu: str | None, threads: int | None, database: Path | None, as_json: bool) -> None:
    """Fit the cost model's coefficients to a device, within a minute.

    Times microbenchmarks, which are not the operators that are ranked later, and stores coefficients and residuals.
    Tuning calibrates by itself when the database has no calibration for the device and thread count.

    \b
    Example:
      autotune calibrate --device cpu --threads 2 --db lowbit.db
    """
    target = options.target_for(device, threads, gpu)
    target.backend.require_compiler()
    target.require_present("nothing can be calibrated")
    path = options.database_for_tuning(database)
    from ...costmodel.calibrate import Calibration
    from ...db.store import Store

    with Store.open(path, mode="tune") as store:
        with progress_on(sys.stderr) as progress:
            progress.update("calibrating", 0, None, target.description)
            fit = target.calibrate()
        store.put_device(target.fingerprint, target.as_dict())
        store.put_calibration(target.fingerprint, target.threads, fit.as_dict(), target.backend.toolchain())
    if as_json:
        print_json({"db": str(path), **fit.as_dict()})
    elif isinstance(fit, Calibration):
        _print(fit, path)
    else:
        print_facts("Calibration", {**fit.as_dict(), "stored in": str(path)})


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
