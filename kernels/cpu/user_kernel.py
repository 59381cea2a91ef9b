"""One compiled candidate of a kernel of somebody's own: its arguments in memory, its tasks on the pool."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numba
import numpy as np
from numba.np.numpy_support import as_dtype
from numpy.typing import NDArray

from ..backend import Array, Kernel
from ..candidate import Candidate
from ..errors import KernelError, LayoutError, ProblemError
from ..linked import LinkedOperand, LinkedType
from ..packed import PackedTensor, pack, require_packed
from ..plugin import PackedType, TileShape
from ..problem import Problem, check_tokens
from ..quantize import Quantized, quantize
from ..user import FILLED, OUT, Definition, Trial
from .arguments import SLOT_BYTES, spill
from .backend import prepare_address, tile_address
from .keys import preparation
from .pool import pool
from .spec import TileSpec
from .task import BLOCK, END, FAILED, HEADER_BYTES, STEP, compile_task
from .values import scratch_bytes

TOKEN_BLOCK = 32


class UserKernel(Kernel):
    """One compiled candidate of somebody's kernel.

    Called as the function itself is, without the parameters that are filled in: ``kernel(query, index, out)``, or by
    name. The search calls it with a `lowbit.kernels.user.Trial` and packed operands instead, and a result is then made.
    """

    def __init__(
        self, definition: Definition, problem: Problem, candidate: Candidate, specs: Mapping[str, TileSpec]
    ) -> None:
        self.definition, self.problem, self.candidate = definition, problem, candidate
        plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self._call = inspect.Signature([inspect.Parameter(name, plain) for name in definition.arguments])
        self._layouts = {role: spec.layout for role, spec in specs.items()}
        sample = definition.sample
        ndim = definition.sample_result.ndim
        self._types: dict[str, Any] = {}
        for name in definition.parameters:
            if name in FILLED:
                self._types[name] = numba.intp
            elif name == OUT:
                self._types[name] = numba.types.Array(numba.float32, ndim, "C")
            elif name not in definition.operands:
                self._types[name] = _argument_type(definition.name, name, sample.arrays[name])
        self._dtypes = {
            name: as_dtype(typ.dtype if isinstance(typ, numba.types.Array) else typ)
            for name, typ in self._types.items()
        }
        self._linked = {} if definition.reads_elements else {role: _link(spec) for role, spec in specs.items()}
        for role, spec in specs.items():
            self._types[definition.roles[role]] = LinkedType(role) if self._linked else _type_of(spec)
        self._task = self._compiled()
        self._pool = pool(candidate.schedule.threads)

    def _compiled(self) -> Any:
        definition = self.definition
        signature = tuple(self._types[name] for name in definition.parameters)
        return compile_task(definition.function, definition.parameters, signature)

    def pack(self, role: str, values: Array | Quantized, capacity: int | None = None) -> PackedTensor:
        """Pack ``values`` for a packed operand, given by its name or its role.

        Parameters
        ----------
        values : float array, shape (heads, tokens, channels) or (tokens, channels), or Quantized
        capacity : int, optional
            Tokens to leave room for.

        Raises
        ------
        LayoutError
            If the kernel has no such operand.
        QuantizationError
            For values that cannot be quantised.
        """
        roles = {name: each for each, name in self.definition.roles.items()}
        role = roles.get(role, role)
        if role not in self._layouts:
            raise LayoutError(f"{self.definition.name} has no packed operand {role!r}: it has {', '.join(roles)}")
        if not isinstance(values, Quantized):
            values = quantize(Definition.with_heads(values), self.problem.stored(role), self.definition.roles[role])
        return pack(values, self._layouts[role], capacity)

    def __call__(self, *operands: Any, tokens: int | None = None, out: Array | None = None, **named: Any) -> Array:
        return self.bind(*operands, tokens=tokens, out=out, **named)()

    def bind(self, *operands: Any, tokens: int | None = None, out: Array | None = None, **named: Any) -> Bound:
        values = self._values(operands, out, named)
        packed = {name: self._checked(role, name, values[name]) for role, name in self.definition.roles.items()}
        count = check_tokens(min(each.tokens for each in packed.values()) if tokens is None else tokens)
        for name, each in packed.items():
            if count > each.capacity:
                raise ProblemError(f"{count} tokens asked of {name}, which holds {each.capacity}")
        values[OUT] = self._fitting(OUT, values[OUT])
        if not (operands and isinstance(operands[0], Trial)):
            self.definition.check_shape(values[OUT].shape, count)
        schedule = self.candidate.schedule
        blocks = -(-count // TOKEN_BLOCK)
        step = -(-blocks // schedule.splits) * TOKEN_BLOCK
        job = np.zeros(HEADER_BYTES + SLOT_BYTES * len(self._types), np.uint8)
        header = job[:HEADER_BYTES].view(np.int64)
        header[END], header[STEP], header[BLOCK] = blocks * TOKEN_BLOCK, step, schedule.block
        roles = {name: role for role, name in self.definition.roles.items()}
        given: dict[str, Any] = {}
        for position, name in enumerate(self.definition.parameters):
            place = HEADER_BYTES + SLOT_BYTES * position
            if name in packed:
                given[name] = packed[name] if packed[name].tokens == count else replace(packed[name], tokens=count)
                fields = (*given[name].addresses, *self._linked.get(roles[name], (0,)))
                job[place : place + 8 * len(fields)].view(np.int64)[:] = fields
                if self._linked:
                    given[name] = LinkedOperand(roles[name], fields)
            elif name not in FILLED:
                given[name] = self._fitting(name, values[name])
                spill(job.ctypes.data + place, given[name])
        return Bound(self, job, -(-blocks * TOKEN_BLOCK // step), given, tuple(packed.values()))

    def run(self, job: int, tasks: int) -> None:
        self._pool.run(self._task.address, job, tasks)

    def _values(self, operands: tuple[Any, ...], out: Array | None, named: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name, whichever way they come."""
        definition = self.definition
        if operands and isinstance(operands[0], Trial):
            trial, *packed = operands
            values = {**trial.inputs.arrays, **dict(zip(definition.roles.values(), packed, strict=True))}
            return {**values, OUT: np.full(trial.expected.shape, np.nan, np.float32) if out is None else out}
        if out is not None:
            named = {**named, OUT: out}
        try:
            return dict(self._call.bind(*operands, **named).arguments)
        except TypeError as error:
            call = f"{definition.name}({', '.join(definition.arguments)})"
            raise KernelError(f"the kernel is called as {call}: {error}") from None

    def _checked(self, role: str, name: str, value: object) -> PackedTensor:
        operand = require_packed(value, name)
        if operand.layout != self._layouts[role]:
            raise LayoutError(
                f"operand {name} is packed as {operand.layout}, the kernel reads {self._layouts[role]}: "
                f"pack it with the kernel's own pack({name!r}, values)"
            )
        if operand.head_dim != self.problem.head_dim:
            raise ProblemError(f"operand {name} has {operand.head_dim} channels, not {self.problem.head_dim}")
        return operand

    def _fitting(self, name: str, value: Any) -> Any:
        """``value`` as the compiled kernel takes it."""
        wanted, dtype = self._types[name], self._dtypes[name]
        if not isinstance(wanted, numba.types.Array):
            try:
                return dtype.type(value)
            except (TypeError, ValueError):
                raise KernelError(f"{self.definition.name}: {name} must be a number, not {value!r}") from None
        if isinstance(value, np.ndarray) and (value.dtype, value.ndim) == (dtype, wanted.ndim):
            flags = value.flags
            ordered = {"C": flags.c_contiguous, "F": flags.f_contiguous, "A": True}[wanted.layout]
            if ordered and flags.aligned and (flags.writeable or name != OUT):
                return value
        have = numba.typeof(value) if isinstance(value, np.ndarray) else type(value).__name__
        raise KernelError(f"{self.definition.name}: {name} must be {wanted}, as make_operands makes it, not {have}")


class Bound:
    """One call with its operands in place."""

    def __init__(
        self, kernel: UserKernel, job: NDArray[np.uint8], tasks: int, given: Mapping[str, Any], packed: tuple[Any, ...]
    ) -> None:
        self._kernel, self._job, self._tasks = kernel, job, tasks
        self._given, self._packed = given, packed
        self._address = job.ctypes.data
        self._header = job[:HEADER_BYTES].view(np.int64)
        self.out: Array = given[OUT]

    def __call__(self) -> Array:
        """Run the kernel; returns ``out``.

        Raises
        ------
        KernelError
            If it raises an exception.
        """
        self._kernel.run(self._address, self._tasks)
        if self._header[FAILED]:
            self._header[FAILED] = 0
            self._fail()
        return self.out

    def _fail(self) -> None:
        """Run once more in the interpreter's sight, to see what the exception is."""
        definition = self._kernel.definition
        filled = dict(zip(FILLED, (0, int(self._header[END]), int(self._header[BLOCK])), strict=True))
        values = {**self._given, **filled}
        try:
            definition.function(*(values[name] for name in definition.parameters))
        except Exception as error:
            raise KernelError(f"{definition.name} raised {type(error).__name__}: {error}") from error
        raise KernelError(f"{definition.name} raised an exception for a part of the tokens")


def _link(spec: TileSpec) -> tuple[int, ...]:
    """Those of `lowbit.kernels.linked.FIELDS` that depend on the tile."""
    tile = tile_address(spec)
    if spec.role == "v":
        return tile, 0, 0, 0, spec.rows, spec.head_dim, scratch_bytes(spec)
    tables = preparation(spec)
    slots, lanes = len(tables.order), len(tables.aux_group)
    slot_bytes = slots * (1 if spec.integer else 4)
    return tile, prepare_address(spec), slot_bytes, 8 * lanes, spec.rows, spec.head_dim, 0


def _type_of(spec: TileSpec) -> PackedType:
    """The type that has the layout, for kernels that read single elements: tiles are compiled into such a kernel."""
    tile = TileShape(spec.pipeline, spec.rows, spec.registers, spec.prefetch, spec.isa.name)
    return PackedType(spec.layout, spec.head_dim, tile)


def _argument_type(kernel: str, name: str, value: Any) -> Any:
    """Numba type of an argument that is not packed.

    Raises
    ------
    KernelError
        If it is neither an array of numbers nor a number.
    """
    try:
        found = numba.typeof(value)
    except ValueError:
        found = None
    if isinstance(found, numba.types.Array) and isinstance(found.dtype, numba.types.Number | numba.types.Boolean):
        return found.copy(readonly=False)
    if isinstance(found, numba.types.Number | numba.types.Boolean):
        return found
    raise KernelError(f"{kernel}: {name} must be an array of numbers or a number, not {type(value).__name__}")
