"""Kernels of somebody's own on the CPU: their space, and one candidate of it compiled.

The candidates are those of the operator that contracts the same operands, without what the kernel cannot use: threads
where it takes no range of tokens, blocks where it takes no block. A candidate's tile functions are the very ones that
are counted; the kernel around them is compiled by Numba, once for all candidates unless it reads single elements.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core.errors import NumbaError
from numba.np.numpy_support import as_dtype
from numpy.typing import NDArray

from ..backend import Array, Backend, Code, Kernel, Rejected
from ..candidate import Candidate
from ..errors import CompileError, KernelError, LayoutError, LowbitError, ProblemError
from ..linked import LinkedOperand, LinkedType
from ..packed import PackedTensor, pack, require_packed
from ..plugin import LAYOUT_NEEDED, PackedType, TileShape
from ..problem import USER, Problem, check_tokens
from ..quantize import Quantized, quantize
from ..user import FILLED, OUT, Definition, Trial, definition_of, load_definition
from . import space as candidates
from .arguments import SLOT_BYTES, spill
from .backend import CpuBackend, prepare_address, tile_address
from .keys import preparation
from .pool import pool
from .spec import TileSpec
from .task import BLOCK, END, FAILED, HEADER_BYTES, STEP, compile_task
from .values import scratch_bytes

TOKEN_BLOCK = 32
BLOCK_TOKENS = 256
"""Tokens of a block in the space of kernels that do not take one."""

MOST_OPERATOR_CHANNELS = 1024
_PLACE = re.compile(r"During: .* at (\S+) \((\d+)\)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONTRACTIONS = {("k",): "qk", ("v",): "sv", ("k", "v"): "attend"}


class UserBackend(Backend):
    """One kernel of somebody's own on the CPU. See `lowbit.kernels.backend.Backend`.

    Parameters
    ----------
    definition : Definition
    """

    name = "cpu"

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self._cpu = CpuBackend()

    def target(self) -> str:
        return self._cpu.target()

    def toolchain(self) -> str:
        return f"{self._cpu.toolchain()}, {self.definition.operator} {self.definition.digest}"

    def tile_toolchain(self) -> str:
        return self._cpu.tile_toolchain()

    def space(self, problem: Problem, threads: int) -> Iterator[Candidate | Rejected]:
        seen: set[Candidate] = set()
        for each in self._cpu.space(self._contraction(problem), threads):
            candidate = self._usable(each.candidate if isinstance(each, Rejected) else each)
            if candidate in seen:
                continue
            seen.add(candidate)
            if isinstance(each, Rejected):
                yield replace(each, candidate=candidate)
            elif problem.rows % candidate.schedule.rows:
                rows = candidate.schedule.rows
                yield Rejected(candidate, f"tiles of {rows} rows do not divide the kernel's {problem.rows}")
            else:
                yield candidate

    def baseline(self, problem: Problem, threads: int) -> Candidate:
        found = self._usable(self._cpu.baseline(self._contraction(problem), threads))
        rows = next(count for count in range(found.schedule.rows, 0, -1) if problem.rows % count == 0)
        return replace(found, schedule=replace(found.schedule, rows=rows))

    def compile(self, problem: Problem, candidate: Candidate) -> UserKernel:
        specs = self._specs(problem, candidate)
        if problem.rows % candidate.schedule.rows:
            raise CompileError(f"tiles of {candidate.schedule.rows} rows do not divide the kernel's {problem.rows}")
        try:
            return self._compiled(problem, candidate, specs)
        except LowbitError as error:
            raise CompileError(f"{candidate.layout}: {error}") from error
        except Exception as error:
            raise CompileError(f"{self.definition.name}: {numba_reason(error)}") from error

    def _compiled(self, problem: Problem, candidate: Candidate, specs: Mapping[str, TileSpec]) -> UserKernel:
        """The kernel, its operands' layouts in their types if it turns out to need them."""
        try:
            return UserKernel(self.definition, problem, candidate, specs)
        except NumbaError as error:
            if LAYOUT_NEEDED not in str(error):
                raise
        self.definition.reads_elements = True
        return UserKernel(self.definition, problem, candidate, specs)

    def tiles(self, problem: Problem, candidate: Candidate) -> tuple[str, ...]:
        return self._cpu.tiles(self._contraction(problem), candidate)

    def tile(self, problem: Problem, candidate: Candidate, symbol: str) -> Code:
        return self._cpu.tile(self._contraction(problem), candidate, symbol)

    def code(self, problem: Problem, candidate: Candidate) -> list[Code]:
        return self._cpu.code(self._contraction(problem), candidate)

    def _specs(self, problem: Problem, candidate: Candidate) -> dict[str, TileSpec]:
        contraction, isa = self._contraction(problem), self._cpu.isa()
        reason = candidates.rejection(contraction, candidate, isa)
        if reason is not None:
            raise CompileError(f"{candidate.layout}: {reason}")
        return {spec.role: spec.canonical for spec in candidates.tile_specs(contraction, candidate, isa)}

    def _contraction(self, problem: Problem) -> Problem:
        """The operator that has the same tiles, on one head: a range of tokens is what a kernel's threads share."""
        if problem.operator != self.definition.operator:
            raise ProblemError(f"{problem.key} is no problem of {self.definition.operator}")
        operator = _CONTRACTIONS[tuple(self.definition.roles)]
        if operator == "qk" and problem.head_dim > MOST_OPERATOR_CHANNELS:
            operator = "gemv"
        return Problem(operator, 1, 1, problem.head_dim, problem.precision, problem.rows)

    def _usable(self, candidate: Candidate) -> Candidate:
        """The candidate without what the kernel has no use for."""
        schedule = candidate.schedule
        if not self.definition.ranged:
            schedule = replace(schedule, splits=1, threads=1)
        if not self.definition.blocked:
            schedule = replace(schedule, block=BLOCK_TOKENS)
        return replace(candidate, schedule=schedule)


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


def numba_reason(error: Exception) -> str:
    """One line of what Numba says in many: its first real message, and the line of source that it points at."""
    text = _COLOUR.sub("", str(error))
    refusals = re.findall(r"raised a specific error:\s*(?:TypingError: )?(.+)", text)
    told = [line.strip() for line in [*reversed(refusals), *text.splitlines()]]
    message = next((line for line in told if line and not line.startswith("Failed in")), "")
    places = [(Path(name), line) for name, line in _PLACE.findall(text) if not name.startswith("<")]
    where = f" ({places[0][0].name}, line {places[0][1]})" if places else ""
    return f"{message[:300] or type(error).__name__}{where}"


def backend_of(operator: str) -> UserBackend:
    """The backend of a kernel that this process has imported, by its operator ``user:name``."""
    return UserBackend(definition_of(operator))


def backend_at(target: str) -> UserBackend:
    """The backend of the kernel at ``file.py:name`` or ``module:name``, with or without ``user:`` before it."""
    return UserBackend(load_definition(target.removeprefix(USER)))
