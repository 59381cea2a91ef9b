"""Options that commands share, and what becomes of their values."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..kernels.errors import DatabaseError, DeviceError, LowbitError, ProblemError
from ..kernels.problem import OPERATORS, PRECISIONS, USER, Problem, check_tokens
from .models import PRESETS, Geometry, Matrix, model_named

if TYPE_CHECKING:
    from .target import Target

DEFAULT_MODEL = "llama-3.2-1b"

F = TypeVar("F", bound=Callable[..., Any])


def names(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Option callback: words between commas, each kept once, in the order given."""
    return tuple(dict.fromkeys(word.strip() for word in value.split(",")))


def whole_numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Option callback: whole numbers between commas, each kept once, in the order given; none where none are given."""
    numbers: list[int] = []
    if value is None:
        return ()
    for word in names(ctx, param, value):
        try:
            numbers.append(int(word))
        except ValueError:
            raise click.BadParameter(f"{word!r} is not a whole number") from None
    return tuple(dict.fromkeys(numbers))


def geometry_options(function: F) -> F:
    """What a problem is made of, but for its precision and length; the values are those of a `Shape`."""
    for option in reversed(
        (
            click.option(
                "--model",
                metavar="NAME|FILE.gguf",
                help=f"Take the shapes, of attention or weights, from a preset ({', '.join(PRESETS)}) or a GGUF file. "
                f"[default: {DEFAULT_MODEL}, unless --heads or --rows is given]",
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
                help=f"What to tune: {', '.join(OPERATORS)}. attend is the whole attention step, qk and sv its halves; "
                "gemv multiplies weights by vectors.",
            ),
            click.option(
                "--window",
                type=int,
                default=0,
                metavar="TOKENS",
                help="attend: each query position sees this many tokens, itself included.  [default: all]",
            ),
            click.option(
                "--softcap",
                type=float,
                default=0.0,
                metavar="NUMBER",
                help="attend: scores s become softcap * tanh(s / softcap).  [default: as they are]",
            ),
            click.option("--rows", type=int, help="gemv: rows (outputs) of one matrix, instead of --model."),
            click.option("--columns", type=int, help="gemv: columns (inputs) of that matrix, a multiple of 8."),
            click.option("--vectors", type=int, help="gemv: vectors multiplied at once, 1 to 16.  [default: 1]"),
        )
    ):
        function = option(function)
    return function


def device_option(function: F) -> F:
    return click.option(
        "--device",
        default="cpu",
        show_default=True,
        metavar="NAME",
        help="Device to tune for: cpu, or a GPU's architecture such as sm_86, which need not be here. 'autotune "
        "devices' lists them.",
    )(function)


def gpu_option(function: F) -> F:
    return click.option(
        "--gpu",
        metavar="BOARD",
        help="Board of a GPU architecture, such as 'RTX 3090'.  [default: the one that is here, else the "
        "architecture's most common one]",
    )(function)


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


PRECISION_NAMES = f"{', '.join(PRECISIONS)}, or two with a + for keys and values of attend (w8a8+w4a8)"

DEFAULT_TOKENS = (128, 512, 2048, 8192, 32768)
"""Context lengths that the main job tunes for."""


Work = dict[Problem, tuple[int, ...]]
"""Problems in the order asked for, and the lengths of each."""


@dataclass(frozen=True)
class Shape:
    """What the options of `geometry_options` say.

    Attributes
    ----------
    model, heads, kv_heads, head_dim, query_rows, operator, window, softcap, rows, columns, vectors
        The options' values.
    """

    model: str | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    query_rows: int
    operator: str
    window: int
    softcap: float
    rows: int | None
    columns: int | None
    vectors: int | None

    def work(self, precisions: tuple[str, ...], tokens: tuple[int, ...], default: tuple[int, ...]) -> Work:
        """Problems, and for each its lengths: context lengths, or the rows of matrices with as many columns.

        Parameters
        ----------
        precisions : tuple of str
        tokens : tuple of int
            Context lengths that were asked for, if any.
        default : tuple of int
            Those that are meant otherwise.

        Raises
        ------
        ProblemError
            If options contradict each other, leave the shape open, or name a problem that cannot exist.
        ModelError
            For an unknown preset, or a model file that is unreadable or does not say what is needed.
        """
        if self.operator.startswith(USER):
            raise ProblemError(f"{self.operator} is somebody's own kernel: tune it with 'autotune kernel FILE.py:NAME'")
        return (
            self._matrices(precisions, tokens)
            if self.operator == "gemv"
            else self._attention(precisions, tokens or default)
        )

    def command(self, precisions: tuple[str, ...], tokens: tuple[int, ...]) -> str:
        """The options again, as one would write them; those at their defaults are left out."""
        given = {
            "operator": None if self.operator == "attend" else self.operator,
            "model": self.model,
            **{name: getattr(self, name) for name in ("heads", "kv_heads", "head_dim", "rows", "columns", "vectors")},
            "query_rows": None if self.query_rows == 1 else self.query_rows,
            "window": self.window or None,
            "softcap": f"{self.softcap:g}" if self.softcap else None,
            "precision": ",".join(precisions),
            "tokens": ",".join(map(str, tokens)) or None,
        }
        if not any(given[name] for name in ("model", "heads", "rows")):
            given["model"] = DEFAULT_MODEL
        words = ((name.replace("_", "-"), value) for name, value in given.items() if value is not None)
        return " ".join(f"--{name} {value}" for name, value in words)

    def _attention(self, precisions: tuple[str, ...], tokens: tuple[int, ...]) -> Work:
        for name in ("rows", "columns", "vectors"):
            if getattr(self, name) is not None:
                raise ProblemError(f"--{name} is for --operator gemv, not for {self.operator}")
        lengths = tuple(check_tokens(count) for count in tokens)
        return {
            Problem(
                self.operator,
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
                precision,
                self.query_rows,
                self.window,
                self.softcap,
            ): lengths
            for shape in geometries(self.model, self.heads, self.kv_heads, self.head_dim)
            for precision in precisions
        }

    def _matrices(self, precisions: tuple[str, ...], tokens: tuple[int, ...]) -> Work:
        for name in ("heads", "kv_heads", "head_dim", "window", "softcap"):
            if getattr(self, name):
                raise ProblemError(f"--{name.replace('_', '-')} is for attention, not for gemv")
        if self.query_rows != 1:
            raise ProblemError("--query-rows is for attention: gemv takes --vectors")
        if tokens:
            raise ProblemError("--tokens is for attention: a matrix's rows come from --model, or from --rows")
        work: dict[Problem, tuple[int, ...]] = {}
        for precision in precisions:
            for matrix in matrices(self.model, self.rows, self.columns):
                problem = Problem("gemv", 1, 1, matrix.columns, precision, 1 if self.vectors is None else self.vectors)
                work[problem] = (*work.get(problem, ()), check_tokens(matrix.rows, "rows"))
        return work


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


def matrices(model: str | None, rows: int | None, columns: int | None) -> tuple[Matrix, ...]:
    """The matrices that the options ask for.

    Raises
    ------
    ProblemError
        If they contradict each other or leave the shape open.
    ModelError
        For an unknown preset, or a model file that is unreadable or does not say what is needed.
    """
    if rows is None and columns is None:
        return model_named(model or DEFAULT_MODEL).matrices
    if model is not None:
        raise ProblemError("--model excludes --rows and --columns")
    if rows is None or columns is None:
        raise ProblemError("a matrix needs both --rows and --columns")
    return (Matrix("matrix", rows, columns),)


def target_for(device: str, threads: int | None = None, gpu: str | None = None, isa: str = "") -> Target:
    """What is to be tuned for: see `lowbit.autotune.target.target_for`. Tells on stderr what it chose itself.

    Raises
    ------
    DeviceError
        If there is no such device, or no such board of it.
    """
    from .target import target_for

    try:
        target = target_for(device, threads, gpu, isa)
    except LowbitError:
        raise
    except Exception as error:
        raise DeviceError(f"unknown device {device!r}: {type(error).__name__}: {error}") from error
    if target.notice:
        click.echo(target.notice, err=True)
    return target


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
