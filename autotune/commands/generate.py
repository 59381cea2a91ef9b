"""`autotune generate`: a text continued by a model."""

from __future__ import annotations

import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...kernels.errors import ProblemError
from ..decoding import cache_type_options, decoding_options, load, warn, warnings_as_lines
from ..group import INTERRUPTED
from ..options import json_option
from ..output import print_json

if TYPE_CHECKING:
    from ...runtime.model.generate import Generation
    from ...runtime.model.model import Model
    from ...runtime.model.session import Session

DEFAULT_CONTEXT = 4096
SEEDS = 1 << 32


@click.command()
@decoding_options
@click.option("-p", "--prompt", metavar="TEXT", help="Text to continue, taken as it is.")
@click.option(
    "-f",
    "--file",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="File that holds the text to continue, instead of --prompt; - for standard input.",
)
@click.option(
    "-n",
    "--predict",
    "--n-predict",
    type=click.IntRange(min=-1),
    default=-1,
    show_default=True,
    metavar="COUNT",
    help="Most tokens to generate; -1 for as many as the context holds.",
)
@click.option(
    "-c",
    "--ctx-size",
    type=click.IntRange(min=0),
    metavar="TOKENS",
    help="Tokens of prompt and answer together; 0 for all that the model was trained for.  "
    f"[default: {DEFAULT_CONTEXT}, or the model's own if that is shorter]",
)
@cache_type_options("f16", several=False)
@click.option(
    "--temp", type=float, default=0.8, show_default=True, help="Temperature; 0 takes the most probable token always."
)
@click.option(
    "--top-k", type=int, default=40, show_default=True, help="Draw from so many most probable tokens; 0 for all."
)
@click.option(
    "--top-p",
    type=float,
    default=0.95,
    show_default=True,
    help="Draw from the most probable tokens that are together so probable; 1 for all.",
)
@click.option(
    "--min-p",
    type=float,
    default=0.05,
    show_default=True,
    help="Draw from tokens at least this fraction as probable as the first; 0 for all.",
)
@click.option(
    "-s", "--seed", type=click.IntRange(min=-1), default=-1, show_default=True, help="Of the draws; -1 for a new one."
)
@click.option("--ignore-eos", is_flag=True, help="Go on where the model ends the text.")
@json_option
@click.pass_context
def generate(
    ctx: click.Context,
    model: Path,
    threads: int | None,
    weights: str,
    database: Path | None,
    prompt: str | None,
    file: Path | None,
    predict: int,
    ctx_size: int | None,
    cache_type_k: str,
    cache_type_v: str,
    temp: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    ignore_eos: bool,
    as_json: bool,
) -> None:
    """Continue a text with a model, with the kernels that were tuned for this machine.

    The answer goes to stdout as it comes, times go to stderr. Ctrl-C ends the answer after the current token. Options
    are named as llama.cpp's, and its samplers apply in its order: top-k, top-p, min-p, temperature.

    \b
    Example:
      autotune generate -m model.gguf -p "It is a truth universally" -n 64 --cache-type-k q8_0 --cache-type-v q8_0
    """
    from ...runtime.model.generate import Generation
    from ...runtime.model.sampling import Chain, Sampler

    text = _prompt(prompt, file)
    chain = Chain(temp, top_k, top_p, min_p)
    seed = secrets.randbelow(SEEDS) if seed == -1 else seed
    with warnings_as_lines():
        loaded = load(model, database, threads, weights)
        tokens = loaded.tokenizer.encode(text)
        session = loaded.session(_context(loaded, ctx_size), cache_type_k, cache_type_v)
        ends = () if ignore_eos else loaded.tokenizer.ends
        generation = Generation(session, tokens, Sampler(chain, seed), predict, ends)
        _warm_up(session)
        answer = _run(generation, loaded, silent=as_json)
    if as_json:
        settings = {"temperature": temp, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
        print_json(report(loaded, session, generation, text, answer) | {"sampling": settings})
    print_times(generation)
    if generation.reason == "interrupted":
        ctx.exit(INTERRUPTED)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise click.UsageError("give the text to continue with either --prompt or --file")
    if file is None:
        assert prompt is not None
        return prompt
    raw = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ProblemError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _context(model: Model, asked: int | None) -> int:
    trained = model.config.context
    if asked is None:
        return min(DEFAULT_CONTEXT, trained)
    if asked > trained:
        warn(f"a context of {asked:,} is longer than the {trained:,} tokens that the model was trained for")
    return asked or trained


def _warm_up(session: Session) -> None:
    """One step that is forgotten: what has to be compiled for it is no part of the answer's time."""
    session.step(0)
    session.truncate(0)


def _run(generation: Generation, model: Model, silent: bool) -> str:
    """Generate, writing the text to stdout as it comes unless ``silent``; returns it whole."""
    stream, pieces = model.tokenizer.stream(), [""]
    with interrupting(generation):
        for token in generation:
            pieces.append(stream.feed(token))
            if pieces[-1] and not silent:
                click.echo(pieces[-1], nl=False)
    pieces.append(stream.finish())
    text = "".join(pieces)
    if not silent:
        click.echo(pieces[-1], nl=not text.endswith("\n"))
    return text


@contextmanager
def interrupting(generation: Generation) -> Iterator[None]:
    """The first Ctrl-C ends the generation after the token that is being computed, a second one ends the command."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals go elsewhere
        return

    def first(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        generation.interrupt()

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def report(model: Model, session: Session, generation: Generation, prompt: str, text: str) -> dict[str, Any]:
    """What ``--json`` prints, but for the options of sampling."""
    cache = session.cache
    segments = [
        {"start": each.start, "tokens": each.tokens, "layout": each.storage.layout.name} for each in cache.segments
    ]
    return {
        "text": text,
        "tokens": generation.tokens,
        "stopped": generation.reason,
        "prompt": prompt,
        "prompt_tokens": generation.timings.prompt_tokens,
        "timings": generation.timings.as_dict(),
        "model": {"path": str(model.path), "architecture": model.config.architecture, "weights": model.weights},
        "cache": {
            "type_k": cache.layout.k.packing.format,
            "type_v": cache.layout.v.packing.format,
            "context": session.context,
            "tokens": cache.length,
            "bytes": cache.nbytes,
            "segments": segments,
        },
        "threads": model.threads,
    }


def print_times(generation: Generation) -> None:
    """One line for the prompt and one for the answer, on stderr."""
    times, ended = generation.timings, {"interrupted": ", interrupted", "context": ", context full"}
    click.echo(f"prompt: {_speed(times.prompt_tokens, times.prompt_s, times.prompt_per_s)}", err=True)
    click.echo(
        f"answer: {len(generation.tokens)} tokens, {_speed(times.steps, times.steps_s, times.steps_per_s, 'steps')}"
        f"{ended.get(generation.reason, '')}",
        err=True,
    )


def _speed(count: int, seconds: float, rate: float | None, name: str = "tokens") -> str:
    return f"{count} {name} in {seconds:.2f} s" + ("" if rate is None else f", {rate:.1f} {name} per second")
