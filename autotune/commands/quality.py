"""`autotune quality`: what compressed keys and values cost a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...kernels.errors import LowbitError, ProblemError
from ...runtime.cache_types import CacheTypes, pairs
from .. import options
from ..decoding import cache_type_options, decoding_options, load, warn, warnings_as_lines
from ..output import print_facts, print_json, print_table
from ..progress import progress_on

if TYPE_CHECKING:
    from ...runtime.model.model import Model
    from ..quality import Decoder

IMPLS = ("lowbit", "llama_cpp")
LETTERS = 16
"""Of a text for each token that is wanted of it, more than any language has; what is left over is not tokenised."""


@click.command()
@decoding_options
@click.option(
    "--text",
    "text_path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="UTF-8 text to score.",
)
@cache_type_options("q8_0,q4_0", several=True)
@click.option(
    "--windows",
    "count",
    type=click.IntRange(min=0),
    default=32,
    show_default=True,
    metavar="COUNT",
    help="Windows of the text, from its beginning; 0 for all of it.",
)
@click.option(
    "--window-tokens",
    type=click.IntRange(min=4),
    default=512,
    show_default=True,
    metavar="COUNT",
    help="Tokens of a window, whose second half is scored.",
)
@click.option(
    "--impl",
    "impls",
    default=",".join(IMPLS),
    show_default=True,
    callback=options.names,
    metavar="LIST",
    help="Whose caches, between commas; llama_cpp is left out where llama-cpp-python is not installed.",
)
@options.json_option
def quality(
    model: Path,
    threads: int | None,
    weights: str,
    database: Path | None,
    text_path: Path,
    cache_type_k: str,
    cache_type_v: str,
    count: int,
    window_tokens: int,
    impls: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure what compressed keys and values cost a model, beside llama.cpp's.

    Each window of the text is computed with an fp16 cache and with the others. Perplexity, the Kullback-Leibler
    divergence of next-token distributions from the fp16 cache's, and how often the most probable token is the same are
    printed with their standard errors. llama.cpp's caches are compared with its own f16 cache on the same tokens.

    \b
    Example:
      autotune quality -m model.gguf --text book.txt --cache-type-k q8_0,q4_0 --cache-type-v q8_0,q4_0
    """
    from ..quality import measure, windows

    types = pairs(cache_type_k.split(","), cache_type_v.split(","))
    unknown = [name for name in impls if name not in IMPLS]
    if unknown:
        raise ProblemError(f"unknown implementation {unknown[0]!r}: choose from {', '.join(IMPLS)}")
    text = _read(text_path)
    with warnings_as_lines(), progress_on(sys.stderr) as progress:
        loaded = load(model, database, threads, weights)
        texts = windows(_tokens(loaded, text, count * window_tokens), window_tokens, count, _first(loaded))
        contestants: dict[str, Callable[[CacheTypes], Decoder]] = {}
        peers = {}
        if "lowbit" in impls:
            contestants["lowbit"] = partial(_session, loaded, window_tokens)
        if "llama_cpp" in impls:
            peers["llama_cpp"] = _add_llama(contestants, loaded, window_tokens)
        if not contestants:
            raise ProblemError(f"nobody is left to measure: llama_cpp is {peers['llama_cpp']}")
        found = measure(contestants, types, texts, progress)
    report = {
        "model": str(model),
        "text": str(text_path),
        "windows": len(texts),
        "window_tokens": window_tokens,
        "scored_tokens": len(texts) * (window_tokens - window_tokens // 2 - 1),
        "weights": weights,
        "threads": loaded.threads,
        "peers": peers,
        "rows": found.rows(),
        "perplexity_ratio_vs_llamacpp": found.perplexity_ratios("lowbit", "llama_cpp"),
    }
    if as_json:
        print_json(report)
    else:
        print_quality(report)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ProblemError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _tokens(model: Model, text: str, wanted: int) -> list[int]:
    """The first ``wanted`` tokens of the text at least, if it has so many; all of them for 0."""
    tokens: list[int] = []
    if wanted:
        tokens = model.tokenizer.encode(text[: LETTERS * wanted], special=False)
    return tokens if wanted and len(tokens) > wanted else model.tokenizer.encode(text, special=False)


def _first(model: Model) -> int | None:
    """The token that texts begin with, for models that expect one."""
    empty = model.tokenizer.encode("")
    bos = model.tokenizer.bos
    return bos if bos is not None and empty[:1] == [bos] else None


def _session(model: Model, context: int, types: CacheTypes) -> Decoder:
    return model.session(context, types.k, types.v)


def _add_llama(contestants: dict[str, Callable[[CacheTypes], Decoder]], model: Model, context: int) -> str:
    """Add llama.cpp, if it is here and can load the file; its version, or why it is absent."""
    from ..bench.contestant import Absent
    from ..bench.llama_model import LlamaModel

    try:
        peer = LlamaModel(model.path, model.threads)
    except (Absent, LowbitError) as error:
        warn(f"llama.cpp is left out: {error}")
        return f"absent: {error}"
    contestants["llama_cpp"] = lambda types: peer.session(context, types.k, types.v)
    return peer.version


COLUMNS = (
    "implementation",
    "cache",
    ">perplexity",
    ">over f16",
    ">KL mean",
    ">KL median",
    ">KL 99.9 %",
    ">same top",
)


def print_quality(report: Mapping[str, Any]) -> None:
    """Print what `quality` reports: a table, and the facts that it rests on."""
    names = ("model", "text", "windows", "window_tokens", "scored_tokens", "weights", "threads", "peers")
    print_facts("Quality", {name: report[name] for name in names})
    print_table("± standard error; divergences in nats", COLUMNS, [_cells(row) for row in report["rows"]])
    for name, value in report["perplexity_ratio_vs_llamacpp"].items():
        click.echo(f"perplexity with {name} over llama.cpp's: {_number(value, '.4f')}")


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    divergence = row["kl_divergence"]
    k, v = row["cache_type_k"], row["cache_type_v"]
    return (
        row["impl"],
        "f16 in other parts" if row["floor"] else CacheTypes(k, v).name,
        _number(row["perplexity"], ".2f"),
        _number(row["perplexity_ratio"], ".4f"),
        *(_number(divergence[name], ".2g") for name in ("mean", "median", "p99.9")),
        _number(row["same_top"], ".2%"),
    )


def _number(estimate: Mapping[str, float | None], form: str) -> str:
    value, error = estimate["value"], estimate["error"]
    return format(value, form) if error is None else f"{value:{form}} ± {error:{form}}"
