"""What commands that decode with a model share: their options, the loaded model, warnings as lines."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .options import MOST_THREADS, database_option, default_database

if TYPE_CHECKING:
    from ..runtime.model.model import Model

F = TypeVar("F", bound=Callable[..., Any])


def model_option(function: F) -> F:
    return click.option(
        "-m",
        "--model",
        type=click.Path(path_type=Path),
        required=True,
        metavar="FILE.gguf",
        help="Model of the Llama family: architecture llama, qwen2 or qwen3.",
    )(function)


def threads_option(function: F) -> F:
    return click.option(
        "-t",
        "--threads",
        type=click.IntRange(min=1, max=MOST_THREADS),
        help="Threads to compute with.  [default: the cores that this process may use]",
    )(function)


def weights_option(function: F) -> F:
    return click.option(
        "--weights",
        type=click.Choice(("tuned", "exact")),
        default="tuned",
        show_default=True,
        help="tuned: 8-bit and 4-bit codes in tuned layouts, multiplied in integers. exact: the file's weights as "
        "float32, slow and large.",
    )(function)


def cache_type_options(default: str, several: bool) -> Callable[[F], F]:
    """``--cache-type-k`` and ``--cache-type-v``, whose values are left as they are written."""
    lists = "between commas, the first of keys with the first of values and so on: " if several else ""

    def decorate(function: F) -> F:
        for role, words in (("v", "values"), ("k", "keys")):
            function = click.option(
                f"--cache-type-{role}",
                f"-ct{role}",
                f"cache_type_{role}",
                default=default,
                show_default=True,
                metavar="LIST" if several else "TYPE",
                help=f"How {words} are stored, {lists}f16, q8_0 or q4_0 (or fp16, int8, int4).",
            )(function)
        return function

    return decorate


def decoding_options(function: F) -> F:
    """Options of every command that loads a model."""
    for option in (database_option, weights_option, threads_option, model_option):
        function = option(function)
    return function


def load(path: Path, database: Path | None, threads: int | None, weights: str) -> Model:
    """The model, with the database that was named, or the default one if it is there; says so if it is not.

    To be called within `warnings_as_lines`.

    Raises
    ------
    ModelError
        If the file cannot be used.
    DatabaseError
        If the database that was named is missing, or one is refused.
    """
    from ..runtime.model.model import Model
    from ..runtime.select import FallbackWarning

    known = database or default_database()
    if database is None and not known.exists():
        if weights == "tuned":
            warn(f"{known} does not exist: using untuned layouts; 'autotune bench model' tunes what a model needs")
        warnings.simplefilter("ignore", FallbackWarning)  # everything falls back, and that has been said
        return Model.load(path, threads=threads, weights=weights)
    return Model.load(path, database=known, threads=threads, weights=weights)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show each warning as one line on stderr, and none twice."""
    told: set[str] = set()

    def show(message: Warning | str, *rest: Any, **named: Any) -> None:
        text = " ".join(str(message).split())
        if text not in told:
            told.add(text)
            warn(text)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def warn(message: str) -> None:
    click.echo(f"warning: {message}", err=True)
