"""LLVM for one instruction set: verified, optimised modules and their assembly, for any target LLVM knows."""

from __future__ import annotations

import functools
import threading
from typing import Any

from llvmlite import binding

from ..errors import CompileError
from .isa import Isa, runs_here

_LOCK = threading.Lock()


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


def assembly(text: str, isa: Isa) -> str:
    """Assembly of a module's ``text`` for ``isa``."""
    with _LOCK:
        machine = target_machine(isa)
        machine.set_asm_verbosity(True)
        return str(machine.emit_assembly(optimised(text, isa)))


def load(text: str, isa: Isa) -> Any:
    """Machine code of a module's ``text`` in this process: an engine with a ``get_function_address``.

    Code is compiled for ``isa`` and not for the host, so that a simulated smaller machine runs what it would run.
    """
    with _LOCK:
        parsed = optimised(text, isa)
        engine = binding.create_mcjit_compiler(parsed, target_machine(isa, jit=True))
        engine.finalize_object()
        return engine
