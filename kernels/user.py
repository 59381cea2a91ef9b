"""Kernels of somebody's own: what their author declares, so that they can be tuned, checked and found again.

`kernel` decorates an ``@njit`` function over `PackedTensor` arguments and makes a `Definition` of it. A definition is
registered under its name, as ``user:name`` an operator like any other: problems, winners and kernels are made of it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .candidate import PIPELINES
from .errors import KernelError, LowbitError, ProblemError
from .problem import MAX_QUERY_ROWS, PRECISIONS, USER, Problem, declare_operator

OUT = "out"
FILLED = ("first", "last", "block")
"""Parameters of a kernel that are not its caller's to pass."""

LARGEST_TOLERANCE = 0.5
SAMPLE_TOKENS = 32
LONGER_TOKENS = 1057
"""A second length that the reference is called with, to see which of its result's axes grow with the tokens."""

_FORMATS = {precision.format: precision.name for precision in PRECISIONS.values()}

Make = Callable[[int, np.random.Generator], Mapping[str, Any]]


@dataclass(frozen=True)
class Packed:
    """A packed operand of a kernel.

    Parameters
    ----------
    formats : sequence of str
        Formats to tune for, of ``fp16``, ``int8`` and ``int4``.
    role : str
        ``k`` if the kernel reduces it over channels (`dot_rows`, `dot_tile`), ``v`` if over tokens
        (`accumulate_rows`, `accumulate_tile`).

    Raises
    ------
    KernelError
        For anything else.
    """

    formats: Sequence[str] = ("int8", "int4")
    role: str = "k"

    def __post_init__(self) -> None:
        formats = (self.formats,) if isinstance(self.formats, str) else tuple(self.formats)
        object.__setattr__(self, "formats", formats)
        for each in formats or ("",):
            if each not in _FORMATS:
                raise KernelError(f"unknown format {each!r}: choose of {', '.join(_FORMATS)}")
        if self.role not in ("k", "v"):
            raise KernelError(f"unknown role {self.role!r}: 'k' is summed over channels, 'v' over tokens")


@dataclass(frozen=True)
class Inputs:
    """One set of a kernel's inputs.

    Attributes
    ----------
    arrays : dict
        Everything that is not packed, by parameter.
    packed : dict of str to ndarray
        float32 (heads, tokens, head_dim), by role.
    """

    arrays: Mapping[str, Any]
    packed: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Trial:
    """Inputs with what should come of them, as the search passes them: it takes the small operand's place."""

    inputs: Inputs
    expected: NDArray[np.float64]


class Definition:
    """A kernel with what its author says of it. Made by `kernel`.

    Calling it calls the function itself, untuned, with whatever layouts its operands have.

    Attributes
    ----------
    name : str
    function : Numba dispatcher
    operands : dict of str to Packed
    tolerance : float
    rows : int
    pipelines : tuple of str
    reads_elements : bool
        Whether compiling it has shown that it needs its operands' layouts in their types.
    """

    def __init__(
        self,
        function: Any,
        name: str,
        operands: Mapping[str, Packed],
        reference: Callable[..., Any],
        make_operands: Make,
        tolerance: float,
        rows: int,
        pipelines: Sequence[str],
    ) -> None:
        self.name, self.function, self.operands = name, function, dict(operands)
        self.tolerance, self.rows, self.pipelines = float(tolerance), rows, tuple(pipelines)
        self._reference, self._make = reference, make_operands
        self.reads_elements = False
        self._flat: set[str] = set()
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._check()
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def __repr__(self) -> str:
        return f"<lowbit kernel {self.name}({', '.join(self.parameters)})>"

    # -- what it looks like -------------------------------------------------------------------------------------------

    @property
    def operator(self) -> str:
        """Operator of its problems, ``user:name``."""
        return USER + self.name

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Parameters of the function."""
        return tuple(inspect.signature(self.function.py_func).parameters)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Parameters that a caller passes, `OUT` among them."""
        return tuple(name for name in self.parameters if name not in FILLED)

    @property
    def ranged(self) -> bool:
        """Whether a call serves a range of tokens, so that several threads can share the work."""
        return "first" in self.parameters

    @property
    def blocked(self) -> bool:
        """Whether the function takes the number of tokens of a block."""
        return "block" in self.parameters

    @cached_property
    def roles(self) -> dict[str, str]:
        """Names of the packed operands by role, ``k`` before ``v``."""
        return {each.role: name for name, each in sorted(self.operands.items(), key=lambda item: item[1].role)}

    @cached_property
    def precisions(self) -> tuple[str, ...]:
        """Precisions to tune for unless others are asked for: every format that all packed operands name."""
        first, *rest = (each.formats for each in self.operands.values())
        return tuple(_FORMATS[each] for each in first if all(each in other for other in rest))

    def problem(self, precision: str) -> Problem:
        """The problem to tune, and to select a kernel for.

        Heads and channels are those of the operands that its author's ``make_operands`` makes.

        Parameters
        ----------
        precision : str
            ``fp16``, ``w8a8`` or ``w4a8``; two of them with a ``+`` for the operands of role ``k`` and ``v``.

        Raises
        ------
        ProblemError
            For a precision that no operand names, or a shape that cannot be packed.
        KernelError
            If ``make_operands`` fails.
        """
        heads, _, channels = next(iter(self.sample.packed.values())).shape
        problem = Problem(self.operator, heads, heads, channels, precision, self.rows)
        for role, name in self.roles.items():
            formats = self.operands[name].formats
            if problem.stored(role).format not in formats:
                raise ProblemError(
                    f"{self.name}: {name} is declared for {', '.join(formats)}, not {problem.stored(role).format}"
                )
        return problem

    @cached_property
    def digest(self) -> str:
        """Digest of the sources of the kernel, of what it calls and of what it is checked with."""
        from .sources import digest

        rest = f"{self.tolerance!r} {self.rows} {self.operands!r} {self.pipelines}"
        return digest([self.function, self._reference, self._make], rest)

    # -- its inputs and its truth -------------------------------------------------------------------------------------

    @cached_property
    def sample(self) -> Inputs:
        """A small set of inputs, for their types and shapes."""
        return self.inputs(SAMPLE_TOKENS)

    @cached_property
    def sample_result(self) -> NDArray[np.float64]:
        """What the reference makes of `sample`, as it is."""
        return self._expected_as_made(self.sample)

    def check_reference(self) -> None:
        """Call the reference once, on `sample`.

        Raises
        ------
        KernelError
            If it fails, or its result is no array of finite numbers.
        """
        self._expected_as_made(self.sample)

    def _expected_as_made(self, made: Inputs) -> NDArray[np.float64]:
        return self.expected(made.arrays, {role: each.astype(np.float64) for role, each in made.packed.items()})

    # -- the shape of its result --------------------------------------------------------------------------------------

    def check_shape(self, shape: tuple[int, ...], tokens: int) -> None:
        """Hold the shape of an ``out`` against the reference's result for as many tokens.

        Axes that are the same for two lengths, or grow with the tokens between them, are taken to go on so. Only for a
        shape that is not found in this way does the reference say itself, on inputs of ``tokens``, once a length.

        Raises
        ------
        KernelError
            If it is another one.
        """
        if shape == self._likely_shape(tokens):
            return
        if tokens not in self._shapes:
            self._shapes[tokens] = self._expected_as_made(self.inputs(tokens)).shape
        if shape != self._shapes[tokens]:
            raise KernelError(
                f"{self.name}: {OUT} must have the shape {self._shapes[tokens]} of the reference's result for {tokens} "
                f"tokens, not {shape}"
            )

    def _likely_shape(self, tokens: int) -> tuple[int, ...] | None:
        """``None`` where an axis neither stays nor grows by whole numbers a token."""
        short, long = self.sample_result.shape, self._longer_shape
        if len(short) != len(long):
            return None
        steps = [divmod(b - a, LONGER_TOKENS - SAMPLE_TOKENS) for a, b in zip(short, long, strict=True)]
        if any(rest for _, rest in steps):
            return None
        return tuple(a + step * (tokens - SAMPLE_TOKENS) for a, (step, _) in zip(short, steps, strict=True))

    @cached_property
    def _longer_shape(self) -> tuple[int, ...]:
        return self._expected_as_made(self.inputs(LONGER_TOKENS)).shape

    # -- inputs of a length, and what is right for them ---------------------------------------------------------------

    def inputs(self, tokens: int, seed: int = 0) -> Inputs:
        """What ``make_operands`` makes for a context of ``tokens``, checked.

        Raises
        ------
        KernelError
            If it fails, or makes something else than the kernel's parameters.
        """
        made = self._run("make_operands", self._make, tokens, np.random.default_rng([seed, tokens]))
        wanted = [name for name in self.arguments if name != OUT]
        if not isinstance(made, Mapping) or set(made) != set(wanted):
            found = ", ".join(map(str, made)) if isinstance(made, Mapping) else type(made).__name__
            raise KernelError(f"{self.name}: make_operands must make a dict of {', '.join(wanted)}, not of {found}")
        packed = {role: self._values(name, made[name], tokens) for role, name in self.roles.items()}
        shapes = {(each.shape[0], each.shape[2]) for each in packed.values()}
        if len(shapes) > 1:
            raise KernelError(f"{self.name}: packed operands differ in heads or channels: {sorted(shapes)}")
        return Inputs({name: made[name] for name in wanted if name not in self.operands}, packed)

    def _values(self, name: str, value: Any, tokens: int) -> NDArray[np.float32]:
        values = np.asarray(value)
        if values.dtype.kind != "f" or values.ndim not in (2, 3) or values.shape[-2] != tokens:
            raise KernelError(
                f"{self.name}: make_operands must make {name} a float array of shape (heads, {tokens}, channels) or "
                f"({tokens}, channels), not {values.dtype} {values.shape}"
            )
        if values.ndim == 2:
            self._flat.add(name)
        return self.with_heads(values)

    @staticmethod
    def with_heads(values: NDArray[Any]) -> NDArray[np.float32]:
        """``values`` in float32 with a head axis."""
        return np.asarray(values[None] if values.ndim == 2 else values, np.float32)

    def expected(self, arrays: Mapping[str, Any], packed: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """The reference's result.

        Parameters
        ----------
        arrays : mapping
            `Inputs.arrays`.
        packed : mapping of str to ndarray of float64
            By role: (heads, tokens, head_dim), the values that the codes stand for.

        Raises
        ------
        KernelError
            If the reference fails, or its result is no array of finite numbers.
        """
        names = {self.roles[role]: values for role, values in packed.items()}
        values = {**arrays, **{name: each[0] if name in self._flat else each for name, each in names.items()}}
        asked = inspect.signature(self._reference).parameters
        result = self._run("the reference", self._reference, **{name: values[name] for name in asked})
        try:
            expected = np.asarray(result, np.float64)
        except (TypeError, ValueError):
            raise KernelError(
                f"the reference of {self.name} returned {type(result).__name__}: it must return an array of numbers"
            ) from None
        if expected.ndim == 0 or not expected.size:
            raise KernelError(
                f"the reference of {self.name} returned an array of shape {expected.shape}: it must have that of {OUT}"
            )
        if not np.isfinite(expected).all():
            bad = tuple(int(each) for each in np.argwhere(~np.isfinite(expected))[0])
            raise KernelError(f"the reference of {self.name} returned {expected[bad]} at {bad}: it must be finite")
        return expected

    def error(self, result: NDArray[Any], expected: NDArray[np.float64]) -> float:
        """Largest difference over the largest magnitude expected; infinite for what is not finite."""
        if result.shape != expected.shape or not np.isfinite(result).all():
            return float("inf")
        largest = max(float(np.abs(expected).max()), float(np.finfo(np.float32).tiny))
        return float(np.abs(result - expected).max()) / largest

    def _run(self, what: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except (LowbitError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise KernelError(f"{self.name}: {what} raised {_told(error)}") from error

    # -- what it may look like ----------------------------------------------------------------------------------------

    def _check(self) -> None:
        if re.fullmatch(r"\w+", self.name) is None:
            raise KernelError(f"a kernel's name is of letters, digits and underscores, not {self.name!r}")
        self._check_parameters()
        self._check_operands()
        if not 0 < self.tolerance <= LARGEST_TOLERANCE:
            raise KernelError(
                f"{self.name}: tolerance is a largest relative error up to {LARGEST_TOLERANCE}, not {self.tolerance}"
            )
        if not isinstance(self.rows, int) or not 1 <= self.rows <= MAX_QUERY_ROWS:
            raise KernelError(f"{self.name}: rows must be 1 to {MAX_QUERY_ROWS}, not {self.rows!r}")
        if not self.pipelines or not set(self.pipelines) <= set(PIPELINES):
            raise KernelError(f"{self.name}: pipelines are of {' and '.join(PIPELINES)}, not {self.pipelines!r}")
        for asked in inspect.signature(self._reference).parameters:
            if asked not in self.arguments or asked == OUT:
                raise KernelError(f"{self.name}: the reference asks for {asked!r}, which is no input of the kernel")
        if len(inspect.signature(self._make).parameters) != 2:
            raise KernelError(f"{self.name}: make_operands takes two arguments, tokens and a random generator")

    def _check_parameters(self) -> None:
        kinds = {each.kind for each in inspect.signature(self.function.py_func).parameters.values()}
        if not kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
            raise KernelError(f"{self.name}: parameters must be plain ones, without * or /")
        if OUT not in self.parameters:
            raise KernelError(f"{self.name} needs a parameter {OUT!r}: the float32 array that it writes its result to")
        if ("first" in self.parameters) != ("last" in self.parameters):
            raise KernelError(f"{self.name} needs both of first and last, the tokens that a call serves, or neither")
        if self.function.targetoptions.get("parallel"):
            raise KernelError(
                f"{self.name} is compiled with parallel=True: take first and last instead, and the tuner picks threads"
            )

    def _check_operands(self) -> None:
        for name, each in self.operands.items():
            if not isinstance(each, Packed):
                raise KernelError(f"{self.name}: operand {name!r} must be a lowbit.Packed, not {type(each).__name__}")
            if name not in self.arguments or name == OUT:
                raise KernelError(f"{self.name} has no parameter {name!r} for a packed operand")
        if len(self.roles) != len(self.operands) or not self.operands:
            raise KernelError(f"{self.name} needs one packed operand, or two of which one has role 'k' and one 'v'")
        if not self.precisions:
            raise KernelError(f"{self.name}: its packed operands share no format")


def _told(error: BaseException) -> str:
    """An exception's kind and message, in one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


_DEFINED: dict[str, Definition] = {}


def kernel(
    name: str | None = None,
    *,
    operands: Mapping[str, Packed],
    reference: Callable[..., Any],
    make_operands: Make,
    tolerance: float = 0.02,
    rows: int = 1,
    pipelines: Sequence[str] = PIPELINES,
) -> Callable[[Any], Definition]:
    """Make an ``@njit`` function over packed operands a kernel that can be tuned.

    The function writes its result to its parameter ``out``, a float32 array. It may have the parameters ``first`` and
    ``last``: the tokens that the call serves, multiples of 32; several calls then share the work, on as many threads
    as the tuner finds best, and must write to different places. A parameter ``block`` is the number of tokens to
    process at a time, which is tuned too.

    Parameters
    ----------
    name : str, optional
        Name in databases; the function's own by default.
    operands : mapping of str to Packed
        The packed ones among the parameters: one, or one of each role.
    reference : callable
        Computes what ``out`` should hold, in float64. Called with the inputs that it has parameters for, by name;
        packed ones as float64 arrays of the values that their codes stand for.
    make_operands : callable
        ``make_operands(tokens, rng)`` makes a dict of all inputs for a context of ``tokens``: packed ones as float
        arrays (heads, tokens, channels) or (tokens, channels), others as the kernel takes them.
    tolerance : float
        Largest difference from the reference, relative to the largest magnitude in it, that is right. The integer
        pipeline rounds the other operand to 8 bits.
    rows : int
        Rows of the small operand that meet each packed head, 1 to 16.
    pipelines : sequence of str
        ``("float",)`` where 8 bits are too coarse for the other operand.

    Raises
    ------
    KernelError
        If something of it does not fit.
    """

    def define(function: Any) -> Definition:
        from numba.core.dispatcher import Dispatcher

        if not isinstance(function, Dispatcher):
            label = getattr(function, "__name__", type(function).__name__)
            raise KernelError(f"{label} is no compiled function: put @numba.njit between @lowbit.kernel and def")
        label = function.py_func.__name__ if name is None else name
        made = Definition(function, label, operands, reference, make_operands, tolerance, rows, pipelines)
        declare_operator(made.operator, tuple(made.roles))
        _DEFINED[made.operator] = made
        return made

    return define


def definition_of(operator: str) -> Definition:
    """The kernel behind an operator such as ``user:cosine_scan``.

    Raises
    ------
    KernelError
        If this process has not imported it.
    """
    if operator not in _DEFINED:
        raise KernelError(f"{operator} is not defined here: import the module that defines the kernel first")
    return _DEFINED[operator]


def load_definition(target: str) -> Definition:
    """The kernel at ``file.py:name`` or ``module:name``; the name may be left out where there is only one.

    Raises
    ------
    KernelError
        If there is none, or its module cannot be imported.
    """
    from .sources import import_file

    place, colon, attribute = target.rpartition(":")
    if not colon:
        place, attribute = target, ""
    try:
        module = import_file(place) if place.endswith(".py") else importlib.import_module(place)
    except (LowbitError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise KernelError(f"cannot import {place!r}: {_told(error)}") from error
    own = {name: each for name, each in vars(module).items() if isinstance(each, Definition)}
    if attribute in own:
        return own[attribute]
    if not attribute and len(own) == 1:
        return next(iter(own.values()))
    if hasattr(module, attribute):
        raise KernelError(f"{attribute} in {place} is no kernel: decorate it with lowbit.kernel")
    known = f"it defines {', '.join(own)}" if own else "it defines none: decorate one with lowbit.kernel"
    if attribute:
        raise KernelError(f"there is no kernel {attribute!r} in {place}: {known}")
    raise KernelError(f"name a kernel of {place}, as in {place}:NAME: {known}")
