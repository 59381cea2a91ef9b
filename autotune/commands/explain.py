"""`autotune explain`: why this layout."""

from __future__ import annotations

import gc
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...kernels.errors import DeviceError
from .. import options
from ..output import microseconds, print_facts, print_json, print_table
from ..progress import progress_on

DEFAULT_TOKENS = 4096

if TYPE_CHECKING:
    from ...costmodel.device import Device
    from ...kernels.backend import Backend
    from ...kernels.problem import Problem
    from ..explain import Explanation, Knowledge, Priced, Report


@click.command()
@options.device_option
@options.geometry_options
@click.option(
    "--precision", default="w8a8", show_default=True, metavar="NAME", help=f"One of {options.PRECISION_NAMES}."
)
@click.option(
    "--tokens", type=int, help=f"Context length; not for gemv, whose matrix has its rows.  [default: {DEFAULT_TOKENS}]"
)
@options.threads_option
@options.protocol_option
@options.database_option
@click.option(
    "--isa",
    metavar="NAME",
    help="Show the code for another instruction set; nothing is predicted then, and no winner looked up.",
)
@click.option("--code", "show_code", is_flag=True, help="Also print the choice's emitted IR and assembly.")
@options.plugin_option
@options.json_option
def explain(
    device: str,
    precision: str,
    tokens: int | None,
    threads: int | None,
    protocol: str,
    database: Path | None,
    isa: str | None,
    show_code: bool,
    plugins: tuple[str, ...],
    as_json: bool,
    **shape: Any,
) -> None:
    """Say why a layout is chosen.

    Shows what its prediction adds up from, its measured time and the runner-up's, and for each packing the unpacking
    instructions per 32 values in the assembly of its best integer kernel. Of a model with several shapes the first is
    meant. What was counted in assembly is kept in the database if there is one that can be written, and nothing else is
    changed there; a device that was not calibrated is calibrated roughly for this one answer.

    \b
    Example:
      autotune explain --heads 8 --kv-heads 2 --head-dim 128 --precision w4a8 --tokens 4096 --code
    """
    from ..explain import explain as gather

    work = options.Shape(**shape).work((precision,), () if tokens is None else (tokens,), (DEFAULT_TOKENS,))
    problem, (length, *_) = next(iter(work.items()))
    options.import_plugins(plugins)
    backend = _backend(device, isa)
    from ...costmodel.device import detect
    from ...search.crew import Crew
    from ...search.messages import Setup
    from ...search.tiles import TileCounter
    from ..kept import KeptTiles

    machine = detect()
    # What is imported stays until the end: looking it through for garbage again and again costs a fifth of the answer.
    gc.freeze()
    count = threads or machine.cores
    path = database or options.default_database()
    known = path if database is not None or path.exists() else None
    setup = Setup(device, plugins, search_path=tuple(sys.path), isa=isa or "")
    with progress_on(sys.stderr) as progress, Crew(setup, machine.cores) as crew, KeptTiles(known) as kept:
        knowledge = _knowledge(backend, isa, machine, problem, length, count, protocol, known, progress.update)
        counter = TileCounter(backend, crew, kept, backend.toolchain())
        answer = gather(problem, length, count, counter, machine, knowledge, protocol, progress.update)
    if knowledge.stale is not None:
        click.echo(f"not considered, tuned with another toolchain: {knowledge.stale.candidate}", err=True)
    if as_json:
        code = {"code": [asdict(each) for each in answer.codes]} if show_code else {}
        print_json({**answer.as_dict(), **code})
        return
    _print(answer)
    if show_code:
        for each in answer.codes:
            click.echo(f"\n{each.role}: {each.symbol}, {each.packing}, IR\n\n{each.ir}\n")
            click.echo(f"{each.role}: {each.symbol}, {each.packing}, assembly for {answer.target}\n\n{each.assembly}")


def _backend(device: str, isa: str | None) -> Backend:
    backend = options.backend_for(device)
    if isa is None:
        return backend
    if device != "cpu":
        raise DeviceError(f"--isa names instruction sets of CPUs, not of {device!r}")
    from ...kernels.cpu.backend import CpuBackend
    from ...kernels.cpu.isa import isa_named

    return CpuBackend(isa_named(isa).name)


def _knowledge(
    backend: Backend,
    isa: str | None,
    machine: Device,
    problem: Problem,
    tokens: int,
    threads: int,
    protocol: str,
    database: Path | None,
    report: Report,
) -> Knowledge:
    """What the database knows, completed by a rough calibration; nothing for another instruction set."""
    from ...costmodel.calibrate import QUICK_BUDGET_S, calibrate
    from ...search.timing import protocol_here
    from ..explain import Knowledge

    if isa is not None and isa != machine.isa:
        return Knowledge()
    known = Knowledge()
    if database is not None:
        name, stored = machine.fingerprint, protocol_here(protocol)
        known = Knowledge.read(database, name, problem, tokens, threads, backend.toolchain(), stored)
    if known.coefficients is None:
        report("calibrating roughly", 0, None, f"there is no calibration for {threads} threads here")
        known = replace(known, coefficients=calibrate(machine, threads, QUICK_BUDGET_S).extended)
    return known


def _print(answer: Explanation) -> None:
    print_facts(
        f"{answer.problem.key} at {answer.tokens} {answer.problem.length_name}",
        {
            "device": answer.device,
            "instruction set": answer.target,
            "threads": answer.threads,
            "provenance": answer.provenance,
            f"tuned at {answer.problem.length_name}": "" if answer.winner is None else answer.winner.tokens,
        },
    )
    rows: list[tuple[object, ...]] = [("choice", *_cells(answer.choice))]
    if answer.runner_up is not None:
        rows.append(("runner-up", *_cells(answer.runner_up)))
    columns = ("", "layout", "pipeline", "schedule", ">predicted µs", ">measured µs", ">unpack ops / 32")
    print_table("Candidates", columns, rows)
    if answer.terms_us:
        terms = [(name, microseconds(time_us)) for name, time_us in answer.terms_us.items() if time_us]
        print_table("What the choice's prediction adds up from", ("term", ">µs"), terms)
    costs = [
        (
            cost.packing.name,
            None if cost.unpack_ops_per_32 is None else f"{cost.unpack_ops_per_32:.2f}",
            "; ".join(
                f"{role}: {', '.join(f'{count} {name}' for name, count in counts.items()) or 'none'}"
                for role, counts in cost.unpacking.items()
            )
            or cost.reason,
        )
        for cost in answer.packings
    ]
    print_table(
        "Unpacking", ("packing", ">ops / 32 values", "unpacking instructions of one iteration of the hot loop"), costs
    )


def _cells(priced: Priced) -> tuple[object, ...]:
    candidate = priced.candidate
    return (
        candidate.layout,
        candidate.pipeline,
        candidate.plan.name,
        microseconds(priced.predicted_us),
        microseconds(priced.median_us),
        f"{priced.features.unpack_ops_per_32:.2f}",
    )
