"""LLVM for one instruction set: verified, optimised modules and their assembly, for any target LLVM knows."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, ParamSpec, TypeVar

from llvmlite import binding

from ..errors import CompileError
from .isa import Isa, runs_here

_LOCK = threading.Lock()

P = ParamSpec("P")
T = TypeVar("T")


def shielded(work: Callable[P, T]) -> Callable[P, T]:
    """Do ``work`` where no signal reaches it: an interrupt within LLVM's callbacks is lost, or frees memory twice.

    Signals are handled by the main thread, which waits for another one that works, and is interrupted afterwards.
    """

    @functools.wraps(work)
    def call(*args: P.args, **named: P.kwargs) -> T:
        if threading.current_thread() is not threading.main_thread():
            return work(*args, **named)
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(work, *args, **named)
            interrupt = None
            while not done.done():
                try:
                    wait([done])
                except KeyboardInterrupt as error:
                    interrupt = error
        if interrupt is not None:
            raise interrupt
        return done.result()

    return call


@functools.cache
def _initialise() -> None:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    binding.initialize_native_asmparser()  # for packings whose own unpacking is inline assembly


def triple_of(isa: Isa, jit: bool = False) -> str:
    """What code for ``isa`` is generated for; the generic set is of this host's family."""
    here = jit or (isa.name == "generic" and runs_here(isa))
    return str(binding.get_process_triple() if here else isa.triple)


def target_machine(isa: Isa, jit: bool = False) -> Any:
    """An LLVM target machine for ``isa``."""
    _initialise()
    triple, cpu = triple_of(isa, jit), isa.cpu
    if not triple.startswith("x86_64") and isa.name == "generic":
        cpu = ""
    return binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=isa.features, opt=3, jit=jit)


def optimised(text: str, isa: Isa) -> Any:
    """Parse, verify and optimise a module's ``text``; loops keep the trip counts that the tiles were emitted with.

    Raises
    ------
    CompileError
        If LLVM rejects the module.
    """
    machine = target_machine(isa)
    try:
        parsed = binding.parse_assembly(text)
        parsed.triple = machine.triple
        for function in parsed.functions:
            # Tiles are emitted to be merged into a kernel's module; alone they must survive without a caller.
            if not function.is_declaration:
                function.linkage = "external"
        parsed.verify()
    except RuntimeError as error:
        raise CompileError(f"LLVM rejected the generated code: {str(error).splitlines()[0]}") from None
    # Tiles arrive unrolled, ordered and with their loops as they should be. The standard pipelines take five times as
    # long and spill more, for they hoist what was placed on purpose.
    manager = binding.create_new_function_pass_manager()
    manager.add_instruction_combine_pass()
    manager.add_simplify_cfg_pass()
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    for function in parsed.functions:
        if not function.is_declaration:
            manager.run(function, builder)
    return parsed


@shielded
def assembly(text: str, isa: Isa) -> str:
    """Assembly of a module's ``text`` for ``isa``."""
    with _LOCK:
        machine = target_machine(isa)
        machine.set_asm_verbosity(True)
        return str(machine.emit_assembly(optimised(text, isa)))


@shielded
def object_code(text: str, isa: Isa) -> bytes:
    """Relocatable machine code of a module's ``text``, for `link`.

    Code is compiled for ``isa`` and not for the host, so that a simulated smaller machine runs what it would run.
    """
    with _LOCK:
        return bytes(target_machine(isa, jit=True).emit_object(optimised(text, isa)))


@shielded
def task_object_code(text: str, native: str, symbol: str, isa: Isa) -> bytes:
    """Relocatable machine code of a compiled Numba function, as the C function ``void symbol(int64_t, int64_t)``.

    Nothing of Python or Numba is left in it, so that neither is needed to run it.

    Parameters
    ----------
    text : str
        LLVM IR, optimised, of a function of two int64 that returns nothing.
    native : str
        Its name in there. Its arguments are where to put a result, where to put an exception, and its own.
    symbol : str
    isa : Isa
        What to compile for.

    Raises
    ------
    CompileError
        If the code still refers to something of the interpreter's.
    """
    entry = f"""
    declare i32 @"{native}"(ptr, ptr, i64, i64)
    define void @"{symbol}"(i64 %job, i64 %index) {{
      %nothing = alloca ptr
      %error = alloca ptr
      %status = call i32 @"{native}"(ptr %nothing, ptr %error, i64 %job, i64 %index)
      ret void
    }}"""
    with _LOCK:
        machine = target_machine(isa, jit=True)
        module = binding.parse_assembly(text)
        module.link_in(binding.parse_assembly(entry))
        for each in (*module.functions, *module.global_variables):
            if not each.is_declaration and each.name != symbol:
                each.linkage = "internal"
        manager = binding.create_new_module_pass_manager()
        manager.add_global_dead_code_eliminate_pass()
        manager.run(module, binding.create_pass_builder(machine, binding.create_pipeline_tuning_options()))
        needed = {each.name for each in (*module.functions, *module.global_variables) if each.is_declaration}
        foreign = sorted(name for name in needed if not name.startswith("llvm.") and name not in _LIBRARY)
        if foreign:
            raise CompileError(f"{symbol} needs {', '.join(foreign)}, which only the interpreter has")
        return bytes(machine.emit_object(module))


_LIBRARY = {"memcpy", "memmove", "memset"}


@shielded
def link(code: bytes, symbols: Sequence[str]) -> tuple[Any, tuple[int, ...]]:
    """Load `object_code` into this process.

    Returns
    -------
    engine : object
        What the code lives in: keep it as long as the code may run.
    addresses : tuple of int
        Of the functions ``symbols``.

    Raises
    ------
    RuntimeError
        If it is no object code, or lacks a function.
    """
    with _LOCK:
        _initialise()
        target = binding.Target.from_triple(binding.get_process_triple())
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target.create_target_machine(jit=True))
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
        engine.finalize_object()
        addresses = tuple(engine.get_function_address(symbol) for symbol in symbols)
        if not all(addresses):
            raise RuntimeError(f"{symbols[addresses.index(0)]} is not in the object code")
        return engine, addresses
