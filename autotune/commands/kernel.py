"""`autotune kernel`: tune somebody's own kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ...kernels.problem import USER, check_tokens
from .. import options
from ..output import print_json
from ..progress import progress_on
from .main import autotune, print_report, require_checked

_SHARED = ("strategy", "top_k", "trials", "budget", "protocol", "threads", "database", "quick", "plugins", "as_json")


def _shared(command: Any) -> Any:
    """Give ``command`` those options of the main job that are about how to tune."""
    known = {parameter.name: parameter for parameter in autotune.params}
    command.params += [known[name] for name in _SHARED]
    return command


@_shared
@click.command()
@click.argument("target", metavar="FILE.py:NAME")
@click.option(
    "--precision",
    callback=options.names,
    default="",
    metavar="LIST",
    help=f"Precisions between commas: {options.PRECISION_NAMES}, or two with a + for kernels of two packed operands.  "
    "[default: those of the formats that the kernel declares]",
)
@click.option(
    "--tokens",
    default="4096,65536",
    show_default=True,
    callback=options.whole_numbers,
    metavar="LIST",
    help="Context lengths between commas.",
)
def kernel(
    target: str,
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
) -> None:
    """Tune a kernel of your own: an njit function that lowbit.kernel decorates.

    FILE.py:NAME is where it lies; MODULE:NAME works too, and the name may be left out if there is only one. Before
    anything is tuned the kernel is compiled and checked against its reference, in floats and in integers, in a process
    of its own. Each candidate is then checked before it is timed, and the winners are stored.

    \b
    Example:
      autotune kernel examples/cosine_scan.py:cosine_scan --precision w4a8 --tokens 4096,65536 --db lowbit.db
    """
    from ...kernels.user import load_definition

    options.import_plugins(plugins)
    definition = load_definition(target)
    names = [name for name in precision if name] or list(definition.precisions)
    problems = [definition.problem(name) for name in names]
    lengths = [check_tokens(count) for count in tokens]
    from ..outcome import Options
    from ..preflight import preflight
    from ..tune import tune

    wishes = Options(
        db_path=options.database_for_tuning(database),
        device=USER + target,
        strategy=strategy,
        top_k=top_k,
        trials=trials,
        budget_s=budget,
        threads=threads,
        quick=quick,
        plugins=plugins,
        protocol=protocol,
        asked=f"--precision {','.join(names)} --tokens {','.join(map(str, lengths))}",
    )
    with progress_on(sys.stderr) as progress:
        preflight(problems, min(lengths), wishes, progress)
        report = tune(problems, lengths, wishes, progress)
    if as_json:
        print_json(report.as_dict())
    else:
        print_report(report)
    require_checked(report)
