"""The main job: `autotune` with no subcommand."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ... import __version__
from ...kernels.errors import LowbitError, NoWinnerError
from .. import options
from ..group import EXIT_STATUSES, Commands, refuse_own_options
from ..output import Result, length_name, print_json, print_phases, print_winners
from ..progress import progress_on

if TYPE_CHECKING:
    from ..outcome import TuneReport

STRATEGIES = ("lep", "verify", "optuna", "oracle")


def _finite(ctx: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a number of seconds")
    return value


@click.group(cls=Commands, invoke_without_command=True, epilog=EXIT_STATUSES)
@click.version_option(__version__, prog_name="autotune")
@options.device_option
@options.gpu_option
@options.geometry_options
@click.option(
    "--precision",
    default="fp16,w8a8,w4a8",
    show_default=True,
    callback=options.names,
    metavar="LIST",
    help=f"Precisions between commas: {options.PRECISION_NAMES}.",
)
@click.option(
    "--tokens",
    callback=options.whole_numbers,
    metavar="LIST",
    help="Context lengths between commas; not for gemv, whose matrices have their rows.  "
    f"[default: {','.join(map(str, options.DEFAULT_TOKENS))}]",
)
@click.option(
    "--strategy",
    type=click.Choice(STRATEGIES),
    help="lep: predict only. verify: measure the best predicted layouts, then schedules of the fastest. optuna: a "
    "study seeded by them. oracle: measure all.  [default: verify, or lep for a device that is not here]",
)
@click.option(
    "--top-k",
    type=click.IntRange(min=1),
    metavar="COUNT",
    help="verify, optuna: how many predicted candidates to measure.  [default: 8, or 4 with --quick]",
)
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    default=40,
    show_default=True,
    metavar="COUNT",
    help="optuna: candidates to try for each problem and context length.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
    metavar="SECONDS",
    help="Stop counting instructions and measuring after this long.",
)
@options.protocol_option
@options.threads_option
@options.database_option
@click.option("--quick", is_flag=True, help="Fewer samples and candidates: rougher numbers, sooner.")
@options.plugin_option
@options.json_option
@click.pass_context
def autotune(
    ctx: click.Context,
    /,
    device: str,
    gpu: str | None,
    precision: tuple[str, ...],
    tokens: tuple[int, ...],
    strategy: str | None,
    top_k: int | None,
    trials: int,
    budget: float | None,
    protocol: str,
    threads: int | None,
    database: Path | None,
    quick: bool,
    plugins: tuple[str, ...],
    as_json: bool,
    **shape: Any,
) -> None:
    """Find the fastest data layouts and kernels for low-bit decoding on a device.

    Without a command this is the main job: enumerate the candidates for each problem, predict their times, measure the
    best on the device and store the winners. An interrupted run resumes where it stopped.

    \b
    Example:
      autotune --device cpu --model llama-3.2-1b --precision w8a8,w4a8 --tokens 512,8192
      autotune --operator gemv --model llama-3.2-1b --precision w8a8,w4a8
    """
    if ctx.invoked_subcommand is not None:
        refuse_own_options(ctx)
        return
    wanted = options.Shape(**shape)
    work = wanted.work(precision, tokens, options.DEFAULT_TOKENS)
    options.import_plugins(plugins)
    options.target_for(device, threads, gpu)
    from ..outcome import Options
    from ..tune import tune

    wishes = Options(
        db_path=options.database_for_tuning(database),
        device=device,
        strategy=strategy,
        top_k=top_k,
        trials=trials,
        budget_s=budget,
        threads=threads,
        quick=quick,
        plugins=plugins,
        protocol=protocol,
        gpu=gpu,
        asked=wanted.command(precision, tokens),
    )
    with progress_on(sys.stderr) as progress:
        report = tune(list(work), work, wishes, progress)
    if as_json:
        print_json(report.as_dict())
    else:
        print_report(report)
    require_checked(report)


def require_checked(report: TuneReport) -> None:
    """Refuse to call a run done that found no winner, or whose winners were not checked: what ran was faulty.

    Raises
    ------
    NoWinnerError
        If there is not a single winner, with the reasons.
    LowbitError
        Naming the problems whose winners were not checked.
    """
    if not report.decisions:
        raise NoWinnerError(f"no winner was found: {report.without_winner}")
    if report.unchecked:
        raise LowbitError(
            "no winner could be checked, for all candidates that ran are faulty: " + "; ".join(report.unchecked)
        )


def print_report(report: TuneReport) -> None:
    """Print what was found, and what was not measured; nothing for a run that `require_checked` refuses altogether."""
    if not report.decisions:
        return
    results = []
    for decision in report.decisions:
        choice = decision.choice
        results.append(
            Result(
                decision.problem,
                f"{decision.tokens} {length_name(decision.problem)}",
                choice.candidate.name,
                choice.provenance,
                choice.predicted_us,
                None if choice.measurement is None else choice.measurement.median_us,
                decision.speedup,
                decision.bandwidth_share,
                len(choice.tied),
            )
        )
    print_winners("Winners", results)
    print_phases(report.phases)
    click.echo(f"{report.candidates} candidates, {report.reasons.total()} more pruned; stored in {report.db}")
    if report.unknown:
        opcodes = ", ".join(f"{name} in {count} kernels" for name, count in report.unknown.most_common())
        click.echo(f"opcodes that the analyzer does not know, priced as others are: {opcodes}", err=True)
    if report.unmeasured:
        click.echo(
            f"{report.unmeasured} candidates were not measured, for want of time or of a quiet machine: "
            "the same command goes on where this one stopped",
            err=True,
        )
    if report.undecided:
        click.echo(f"no winner: {report.without_winner}", err=True)
    if report.noisy:
        click.echo(f"predicted only, the machine was too busy: {'; '.join(report.noisy)}", err=True)
