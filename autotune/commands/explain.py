"""`autotune explain`: why this layout."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..output import microseconds, percent, print_facts, print_json, print_table, times
from ..progress import progress_on

DEFAULT_TOKENS = 4096

if TYPE_CHECKING:
    from ...kernels.problem import Problem
    from ..explain import Explanation, Knowledge, Priced, Report
    from ..target import Target


@click.command()
@options.device_option
@options.gpu_option
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
    gpu: str | None,
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
    meant. What was counted in assembly is kept in the database if there is one that can be written, or in a new one
    where --db says, and nothing else is changed there; a CPU that was not calibrated is calibrated roughly for this one
    answer. A GPU need not be here.

    \b
    Example:
      autotune explain --heads 8 --kv-heads 2 --head-dim 128 --precision w4a8 --tokens 4096 --code
    """
    from ..explain import explain as gather

    work = options.Shape(**shape).work((precision,), () if tokens is None else (tokens,), (DEFAULT_TOKENS,))
    problem, (length, *_) = next(iter(work.items()))
    options.import_plugins(plugins)
    target = options.target_for(device, threads, gpu, isa or "")
    target.backend.require_compiler()
    from ...search.crew import Crew
    from ...search.messages import Setup
    from ...search.tiles import TileCounter
    from ..kept import KeptTiles, is_new

    # What is imported stays until the end: looking it through for garbage again and again costs a fifth of the answer.
    gc.freeze()
    path = database or options.default_database()
    known = path if database is not None or path.exists() else None
    if known is not None and is_new(known):
        click.echo(f"{known} is made, for what is counted", err=True)
    setup = Setup(target.name, plugins, search_path=tuple(sys.path), isa=target.isa)
    with progress_on(sys.stderr) as progress, Crew(setup, target.workers) as crew, KeptTiles(known) as kept:
        knowledge = _knowledge(target, problem, length, protocol, known, progress.update)
        counter = TileCounter(target.backend, crew, kept, target.backend.tile_toolchain())
        answer = gather(problem, length, target, counter, knowledge, protocol, progress.update)
    if knowledge.stale is not None:
        click.echo(f"not considered, tuned with another toolchain: {knowledge.stale.candidate}", err=True)
    _hint(answer)
    if kept.lost:
        click.echo(f"what was counted is not kept: {kept.lost}", err=True)
    if as_json:
        code = {"code": [asdict(each) for each in answer.codes]} if show_code else {}
        print_json({**answer.as_dict(), **code})
        return
    _print(answer)
    if show_code:
        for each in answer.codes:
            source, machine = target.languages
            click.echo(f"\n{each.role}: {each.symbol}, {each.packing}, {source}\n\n{each.ir}\n")
            click.echo(f"{each.role}: {each.symbol}, {each.packing}, {machine}\n\n{each.assembly}")


def _knowledge(
    target: Target, problem: Problem, tokens: int, protocol: str, database: Path | None, report: Report
) -> Knowledge:
    """What the database knows, completed by a rough calibration; nothing for another instruction set."""
    from ..explain import Knowledge
    from ..kept import is_new

    prices = target.known_prices(None)
    if prices is None and not target.present:
        return Knowledge()
    known = Knowledge(prices)
    if database is not None and not is_new(database):
        known = Knowledge.read(database, target, problem, tokens, target.protocol(protocol))
    if known.prices is None:
        rough = target.rough_prices(lambda why: report("calibrating roughly", 0, None, why))
        known = replace(known, prices=rough)
    return known


def _hint(answer: Explanation) -> None:
    """Tell on stderr if the stored winner, tuned at another length, is predicted to be slow at this one."""
    if answer.winner is None or answer.faster is None:
        return
    ratio = (answer.choice.predicted_us or 0.0) / (answer.faster.predicted_us or 1.0)
    click.echo(
        f"the stored winner was tuned at {answer.winner.tokens} {answer.problem.length_name}; "
        f"{answer.faster.candidate} is predicted {times(ratio)} faster at {answer.tokens}: tune that length",
        err=True,
    )


def _print(answer: Explanation) -> None:
    threads = {} if answer.threads is None else {"threads": answer.threads}
    print_facts(
        f"{answer.problem.key} at {answer.tokens} {answer.problem.length_name}",
        {
            "device": answer.target.fingerprint,
            "instruction set": answer.target.backend.target(),
            **threads,
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
    if answer.kernel:
        _print_kernel(answer.kernel)
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


def _print_kernel(kernel: Mapping[str, Any]) -> None:
    """What a GPU's kernel needs and executes."""
    told = {name.replace("_", " "): value for name, value in kernel.items() if name not in ("loops", "unknown")}
    told["hot loop"] = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in kernel["hot_loop"].items())
    told["occupancy"] = percent(kernel["occupancy"])
    units = told.pop("units us", {})
    print_facts("Kernel of the choice", told)
    if units:
        rows = [(name.replace("_", " "), microseconds(time_us)) for name, time_us in units.items()]
        print_table("How long units are busy if all multiprocessors share the work", ("unit", ">µs"), rows)
    loops = [
        (
            each["loop"],
            each["passes"] or None,
            ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in each["instructions"].items()),
        )
        for each in kernel["loops"]
    ]
    print_table("What one iteration executes", ("loop", ">passes", "instructions of a warp"), loops)
    if kernel["unknown"]:
        click.echo(f"unknown instructions: {', '.join(kernel['unknown'])}", err=True)


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
