"""`autotune bench`: against the limit and the peers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ...kernels.errors import CompileError, LowbitError, ProblemError
from ...kernels.problem import PRECISIONS, Problem, check_tokens
from .. import options
from ..bench.case import Case, precision_for
from ..bench.contestant import GEMV_NAMES, NAMES, contestant_named
from ..models import PRESETS, Matrix
from ..output import print_json
from ..progress import progress_on
from .bench_model import model as whole_model

if TYPE_CHECKING:
    from ...kernels.candidate import Candidate
    from ..bench.outcome import Outcome

MODELS = ("llama-3.2-1b", "smollm2-135m")

F = TypeVar("F", bound=Callable[..., Any])


def _shared(function: F) -> F:
    """Options of both comparisons."""
    for option in reversed(
        (
            options.threads_option,
            options.protocol_option,
            click.option(
                "--impl",
                "impls",
                callback=_impls,
                metavar="LIST",
                help="Implementations between commas, or module:callable that makes one of yours.  [default: all]",
            ),
            click.option("--candidate", metavar="NAME", help="Use this kernel instead of the stored winners."),
            click.option("--quick", is_flag=True, help="Fewer rounds: rougher numbers, sooner."),
            options.database_option,
            options.json_option,
        )
    ):
        function = option(function)
    return function


def _impls(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else options.names(ctx, param, value)


@click.group()
def bench() -> None:
    """Compare this project's winners with the read-bandwidth limit and with its peers.

    Everyone gets the same inputs, stores them in its own way, is checked against float64 on what it stored, and is
    timed in turns with the others. Peers that are not installed are left out.

    \b
    Example:
      autotune bench attention --tokens 512,4096 --kv int8 --db lowbit.db
      autotune bench model -m model.gguf
    """


@bench.command()
@click.option("--heads", type=int, default=32, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=int, default=8, show_default=True, help="Key/value heads.")
@click.option("--head-dim", type=int, default=128, show_default=True, help="Channels of a head, a multiple of 8.")
@click.option("--query-rows", type=int, default=1, show_default=True, help="Query positions decoded at once, 1 to 16.")
@click.option(
    "--tokens",
    default="512,4096,32768",
    show_default=True,
    callback=options.whole_numbers,
    metavar="LIST",
    help="Context lengths between commas.",
)
@click.option(
    "--kv",
    default="fp16,int8,int4",
    show_default=True,
    callback=options.names,
    metavar="LIST",
    help="Formats of keys and values between commas; int8+int4 for keys and values that differ.",
)
@_shared
def attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    query_rows: int,
    tokens: tuple[int, ...],
    kv: tuple[str, ...],
    **shared: Any,
) -> None:
    """Compare decode attention.

    Where the database has no winner of this device for exactly a problem and length, one is tuned and stored first.

    \b
    Example:
      autotune bench attention --heads 32 --kv-heads 8 --head-dim 128 --tokens 512,4096,32768 --json
    """
    lengths = [check_tokens(count) for count in tokens]
    problems = [Problem("attend", heads, kv_heads, head_dim, precision_for(each), query_rows) for each in kv]
    _compare([Case(problem, count) for count in lengths for problem in problems], NAMES, **shared)


@bench.command()
@click.option(
    "--model",
    "models",
    callback=_impls,
    metavar="LIST",
    help=f"Models between commas whose matrices to multiply: {', '.join(PRESETS)}, or GGUF files. "
    f"[default: {','.join(MODELS)}, unless --rows is given]",
)
@click.option("--rows", type=int, help="Rows (outputs) of one matrix, instead of --model.")
@click.option("--columns", type=int, help="Columns (inputs) of that matrix, a multiple of 8.")
@click.option("--vectors", type=int, default=1, show_default=True, help="Vectors multiplied at once, 1 to 16.")
@click.option(
    "--precision",
    default="fp16,w8a8,w4a8",
    show_default=True,
    callback=options.names,
    metavar="LIST",
    help=f"Precisions between commas: {', '.join(PRECISIONS)}.",
)
@_shared
def gemv(
    models: tuple[str, ...] | None,
    rows: int | None,
    columns: int | None,
    vectors: int,
    precision: tuple[str, ...],
    **shared: Any,
) -> None:
    """Compare matrix-vector products.

    Where the database has no winner of this device for exactly a matrix, one is tuned and stored first.

    \b
    Example:
      autotune bench gemv --model llama-3.2-1b,smollm2-135m --precision w8a8,w4a8
    """
    cases = [
        Case(Problem("gemv", 1, 1, matrix.columns, each, vectors), check_tokens(matrix.rows, "rows"), matrix.name)
        for matrix in _matrices(models, rows, columns)
        for each in precision
    ]
    _compare(cases, GEMV_NAMES, **shared)


@bench.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default="docs/performance",
    show_default=True,
    metavar="DIRECTORY",
    help="Where the reports are: the JSON that the comparisons print, one file each.",
)
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    default="docs/performance.md",
    show_default=True,
    metavar="FILE",
    help="The document whose results to rewrite.",
)
def report(data: Path, page: Path) -> None:
    """Write stored results into a document: tables, and charts beside the data.

    \b
    Example:
      autotune bench report --data docs/performance --page docs/performance.md
    """
    from ..bench.page import write_page

    for path in write_page(data, page):
        click.echo(path)


bench.add_command(whole_model)


def _matrices(models: tuple[str, ...] | None, rows: int | None, columns: int | None) -> list[Matrix]:
    """What to multiply; matrices of models are named after them."""
    if rows is not None or columns is not None:
        return list(options.matrices(",".join(models) if models else None, rows, columns))
    found = []
    for model in models or MODELS:
        found += [replace(each, name=f"{model} {each.name}") for each in options.matrices(model, None, None)]
    return found


def _compare(
    cases: Sequence[Case],
    default: Sequence[str],
    threads: int | None,
    protocol: str,
    impls: tuple[str, ...] | None,
    candidate: str | None,
    quick: bool,
    database: Path | None,
    as_json: bool,
) -> None:
    from ...costmodel.device import detect
    from ...kernels.candidate import Candidate
    from ..bench import run
    from ..bench.table import print_outcome
    from ..bench.winners import winners

    _require_memory(cases)
    names = impls or tuple(default)
    for name in names:
        _refuse_unknown(name, default)
    device = detect()
    count = threads or device.cores
    chosen: dict[Case, str] = {}
    with progress_on(sys.stderr) as progress:
        if "lowbit" in names and candidate is not None:
            given = Candidate.parse(candidate)
            _require_compilable(cases, given)
            chosen = dict.fromkeys(cases, given.name)
        elif "lowbit" in names:
            path = options.database_for_tuning(database)
            chosen = winners(cases, path, device, count, protocol, progress, _say)
        effort = run.QUICK if quick else run.FULL
        outcome: Outcome = run.bench(cases, names, count, protocol, effort, chosen, progress, device)
    report = outcome.as_dict()
    if as_json:
        print_json(report)
    else:
        print_outcome(report)


def _require_memory(cases: Sequence[Case]) -> None:
    import psutil

    available = int(psutil.virtual_memory().available)
    for case in cases:
        if case.memory_bytes > available:
            raise ProblemError(
                f"{case.key}: operands of {case.memory_bytes / 2**30:,.1f} GiB do not fit in memory, "
                f"of which {available / 2**30:,.1f} GiB are free"
            )


def _require_compilable(cases: Sequence[Case], candidate: Candidate) -> None:
    """Compile what was asked for once for each problem: a worker could only say that its contestant failed."""
    from ...kernels.backend import backend_named

    backend = backend_named("cpu")
    for problem in dict.fromkeys(case.problem for case in cases):
        try:
            backend.compile(problem, candidate)
        except LowbitError as error:
            raise type(error)(f"--candidate does not fit {problem.key}: {error}") from error
        except Exception as error:
            raise CompileError(f"--candidate cannot be compiled for {problem.key}: {error}") from error


def _refuse_unknown(name: str, known: Sequence[str]) -> None:
    if ":" not in name and name not in known:
        raise ProblemError(f"unknown implementation {name!r}: choose from {', '.join(known)}")
    if ":" in name:
        try:
            contestant_named(name)
        except Exception as error:
            raise ProblemError(f"cannot make {name!r}: {type(error).__name__}: {error}") from error


def _say(message: str) -> None:
    click.echo(message, err=True)
