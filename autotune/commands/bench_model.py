"""`autotune bench model`: whole models, beside llama.cpp."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...kernels.errors import ProblemError
from ...runtime.cache_types import CacheTypes, pairs
from .. import options
from ..decoding import cache_type_options, model_option, threads_option, warn, warnings_as_lines
from ..output import print_json
from ..progress import progress_on

if TYPE_CHECKING:
    from ...costmodel.device import Device
    from ..outcome import Progress

MODEL_NAMES = ("lowbit", "llama_cpp")


@click.command("model")
@model_option
@click.option(
    "-p",
    "--n-prompt",
    "prompt",
    type=click.IntRange(min=0),
    default=512,
    show_default=True,
    metavar="COUNT",
    help="Tokens of a prompt; 0 leaves the test out.",
)
@click.option(
    "-n",
    "--n-gen",
    "generate",
    type=click.IntRange(min=0),
    default=128,
    show_default=True,
    metavar="COUNT",
    help="Tokens to generate; 0 leaves the test out.",
)
@click.option(
    "-d",
    "--n-depth",
    "depths",
    default="0,2048,7900",
    show_default=True,
    callback=options.whole_numbers,
    metavar="LIST",
    help="Tokens that the cache holds before, between commas.",
)
@cache_type_options("f16,q8_0,q4_0", several=True)
@threads_option
@click.option(
    "-r",
    "--repetitions",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    metavar="COUNT",
    help="Undisturbed repetitions of each test.",
)
@click.option(
    "--impl",
    "impls",
    default=",".join(MODEL_NAMES),
    show_default=True,
    callback=options.names,
    metavar="LIST",
    help="Implementations between commas, or module:callable that makes one of yours.",
)
@click.option("--no-tune", is_flag=True, help="Take what the database has, and tune nothing first.")
@options.database_option
@options.json_option
def model(
    model: Path,
    prompt: int,
    generate: int,
    depths: tuple[int, ...],
    cache_type_k: str,
    cache_type_v: str,
    threads: int | None,
    repetitions: int,
    impls: tuple[str, ...],
    no_tune: bool,
    database: Path | None,
    as_json: bool,
) -> None:
    """Compare decoding with a whole model, as llama-bench does, with llama.cpp on the same file.

    Each implementation has a process of its own, and only one computes at a time. Repetitions take turns. What the
    database has no measured winner for is tuned and stored first.

    \b
    Example:
      autotune bench model -m model.gguf -p 512 -n 128 -d 0,2048,7900 -t 2 --json
    """
    types = pairs(cache_type_k.split(","), cache_type_v.split(","))
    _check(prompt, generate, depths, impls)
    from ...costmodel.device import detect
    from ...kernels.cpu.pool import allowed_cpus
    from ..bench.model_run import Plan, bench_model
    from ..bench.model_table import print_models

    device, count = detect(), threads or len(allowed_cpus())
    with warnings_as_lines(), progress_on(sys.stderr) as progress:
        lengths = tuple(depth + max(generate, 1) for depth in depths)
        found = _database(model, database, types, lengths, count, device, impls, no_tune, progress)
        plan = Plan(model, found, impls, types, depths, prompt, generate, count, repetitions)
        report = bench_model(plan, progress, device).as_dict()
    if as_json:
        print_json(report)
    else:
        print_models(report)


def _check(prompt: int, generate: int, depths: tuple[int, ...], impls: tuple[str, ...]) -> None:
    if not prompt and not generate:
        raise ProblemError("there is nothing to measure: -p and -n are both 0")
    for depth in depths:
        if depth < 0:
            raise ProblemError(f"a depth must be 0 tokens or more, not {depth}")
    for name in impls:
        if name not in MODEL_NAMES:
            from ..bench.model_contestant import model_contestant_named

            try:
                model_contestant_named(name)
            except ProblemError:
                raise
            except Exception as error:
                raise ProblemError(f"cannot make {name!r}: {type(error).__name__}: {error}") from error


def _database(
    model: Path,
    database: Path | None,
    types: tuple[CacheTypes, ...],
    lengths: tuple[int, ...],
    threads: int,
    device: Device,
    impls: tuple[str, ...],
    no_tune: bool,
    progress: Progress,
) -> Path | None:
    """The database that has what the model needs, tuned first unless that is not wanted; None if there is none."""
    from ..bench.model_problems import model_cases
    from ..bench.winners import winners

    if "lowbit" not in impls:
        return None
    if no_tune:
        if database is None and not options.default_database().exists():
            warn(f"{options.default_database()} does not exist: using untuned layouts")
            return None
        return options.database_for_reading(database)
    cases = model_cases(model, threads, types, lengths)
    path = options.database_for_tuning(database)
    winners(cases, path, device, threads, "cold", progress, lambda said: click.echo(said, err=True))
    return path
