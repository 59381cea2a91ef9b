"""Options that commands share, and what becomes of their values."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..kernels.errors import DatabaseError, DeviceError, LowbitError, ProblemError
from ..kernels.problem import OPERATORS, PRECISIONS, Problem
from .models import PRESETS, Geometry, model_named

if TYPE_CHECKING:
    from ..kernels.backend import Backend

DEFAULT_MODEL = "llama-3.2-1b"

F = TypeVar("F", bound=Callable[..., Any])


def names(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Option callback: words between commas, each kept once, in the order given."""
    return tuple(dict.fromkeys(word.strip() for word in value.split(",")))


def whole_numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Option callback: whole numbers between commas, each kept once, in the order given."""
    numbers = []
    for word in names(ctx, param, value):
        try:
            numbers.append(int(word))
        except ValueError:
            raise click.BadParameter(f"{word!r} is not a whole number") from None
    return tuple(dict.fromkeys(numbers))


def geometry_options(function: F) -> F:
    """``--model`` or ``--heads``, ``--kv-heads`` and ``--head-dim``; ``--query-rows`` and ``--operator``."""
    for option in reversed(
        (
            click.option(
                "--model",
                metavar="NAME|FILE.gguf",
                help=f"Take the attention geometry from a preset ({', '.join(PRESETS)}) or from a GGUF file. "
                f"[default: {DEFAULT_MODEL}, unless --heads is given]",
            ),
            click.option("--heads", type=int, help="Query heads, instead of --model."),
            click.option("--kv-heads", type=int, help="Key/value heads.  [default: as many as --heads]"),
            click.option("--head-dim", type=int, help="Channels of a head, a multiple of 8."),
            click.option(
                "--query-rows", type=int, default=1, show_default=True, help="Query positions decoded at once, 1 to 16."
            ),
            click.option(
                "--operator",
                default="attend",
                show_default=True,
                metavar="NAME",
                help=f"What to tune: {', '.join(OPERATORS)}. attend is the whole attention step, qk and sv its halves.",
            ),
        )
    ):
        function = option(function)
    return function


def device_option(function: F) -> F:
    return click.option("--device", default="cpu", show_default=True, metavar="NAME", help="Device to tune for.")(
        function
    )


MOST_THREADS = 256
"""More threads than cores are allowed, to see what that costs; calibration has buffers for this many."""


def threads_option(function: F) -> F:
    return click.option(
        "--threads",
        type=click.IntRange(min=1, max=MOST_THREADS),
        help="Threads of a decode step.  [default: the device's cores]",
    )(function)


def protocol_option(function: F) -> F:
    return click.option(
        "--protocol",
        type=click.Choice(("cold", "warm")),
        default="cold",
        show_default=True,
        help="Time with operands that come from memory, as between the layers of a model (evicted from all caches "
        "before each sample where the machine can, and then stored as evicted), or that stay in the caches.",
    )(function)


def database_option(function: F) -> F:
    return click.option(
        "--db",
        "database",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="SQLite database.  [default: lowbit.db in the user's data directory]",
    )(function)


def plugin_option(function: F) -> F:
    return click.option(
        "--plugin",
        "plugins",
        multiple=True,
        metavar="MODULE",
        help="Import MODULE first, here and in every worker: it may register packings. Repeatable.",
    )(function)


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")(
        function
    )


PRECISION_NAMES = ", ".join(PRECISIONS)


def geometries(
    model: str | None, heads: int | None, kv_heads: int | None, head_dim: int | None
) -> tuple[Geometry, ...]:
    """The attention shapes that the geometry options ask for.

    Raises
    ------
    ProblemError
        If they contradict each other or leave the shape open.
    ModelError
        For an unknown preset or an unreadable model file.
    """
    if heads is None:
        if kv_heads is not None or head_dim is not None:
            raise ProblemError("--kv-heads and --head-dim need --heads")
        return model_named(model or DEFAULT_MODEL).geometries
    if model is not None:
        raise ProblemError("--model and --heads exclude each other")
    if head_dim is None:
        raise ProblemError("--heads needs --head-dim")
    return (Geometry(heads, heads if kv_heads is None else kv_heads, head_dim, layers=1),)


def problems_of(
    shapes: tuple[Geometry, ...], operator: str, query_rows: int, precisions: tuple[str, ...]
) -> list[Problem]:
    """One problem for each shape and precision.

    Raises
    ------
    ProblemError
        If one of them cannot exist.
    """
    return [
        Problem(operator, shape.heads, shape.kv_heads, shape.head_dim, precision, query_rows)
        for shape in shapes
        for precision in precisions
    ]


def backend_for(device: str) -> Backend:
    """The backend called ``device``, or the one that ``module:callable`` makes.

    Raises
    ------
    DeviceError
        If there is none.
    """
    from ..search.worker import resolve_backend

    try:
        return resolve_backend(device)
    except LowbitError:
        raise
    except Exception as error:
        raise DeviceError(f"unknown device {device!r}: {type(error).__name__}: {error}") from error


def default_database() -> Path:
    """``lowbit.db`` in the user's data directory, which is not created."""
    import platformdirs

    return Path(platformdirs.user_data_dir("lowbit", appauthor=False)) / "lowbit.db"


def database_for_tuning(path: Path | None) -> Path:
    """``path``, or the default database with its directory created."""
    if path is not None:
        return path
    path = default_database()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def database_for_reading(path: Path | None) -> Path:
    """``path``, or the default database.

    Raises
    ------
    DatabaseError
        If neither is there.
    """
    path = path or default_database()
    if not path.exists():
        raise DatabaseError(f"{path} does not exist: tune first, or name another database with --db")
    return path


def import_plugins(modules: tuple[str, ...]) -> None:
    """Import each module for what it registers.

    Raises
    ------
    click.BadParameter
        If one cannot be imported, with the reason.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise click.BadParameter(
                f"cannot import {module!r}: {type(error).__name__}: {error}", param_hint="--plugin"
            ) from error
