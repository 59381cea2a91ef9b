"""From winners to what a deployment without a compiler runs: their code, and how it is launched at any length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..db.kernels import KernelImage, KernelLaunch, Rule, ShippedWinner
from ..kernels.candidate import Candidate
from ..kernels.cuda.program import Entry, Geometry, Program, build
from ..kernels.problem import Problem

if TYPE_CHECKING:
    from ..db.records import Winner
    from ..db.store import Store
    from ..kernels.cuda.backend import CudaBackend, Shipped

LENGTHS = (*range(1, 70), *(length + step for length in (256, 1024, 4096, 65536, 1 << 20, 1 << 24) for step in (-1, 0)))
"""Lengths whose launches have to follow the stored rules: all small ones, and around powers of two."""


def ship(store: Store, backend: CudaBackend, winners: Sequence[Winner]) -> None:
    """Keep the code of stored winners, compiling only what the store does not hold yet.

    Raises
    ------
    CompileError
        If a winner's code cannot be made.
    DatabaseError
        If its launches follow no rule that can be stored.
    """
    toolchain, arch = backend.toolchain(), backend.arch
    ready = []
    # Code that no winner refers to goes when the first launch is stored: all of it is read before.
    for winner in winners:
        problem, candidate = Problem.parse(winner.problem), Candidate.parse(winner.candidate)
        program = build(problem, candidate, arch)
        entries = [entry for entry in (program.main, program.merge) if entry is not None]
        known = [store.kernel(toolchain, entry.symbol, arch) for entry in entries]
        images = [image for image in known if image is not None]
        if len(images) < len(entries):
            images = [_image(each, toolchain, arch) for each in backend.shipped(problem, candidate)]
        ready.append((winner, shipped_winner(program), images))
    for winner, shipped, images in ready:
        store.put_shipped(winner, shipped, images)


def shipped_winner(program: Program) -> ShippedWinner:
    """How a program is launched, as rules of the length.

    Raises
    ------
    DatabaseError
        If a number follows no rule.
    """
    launches = [_launch(program, program.main, program.geometry)]
    if program.merge is not None:
        launches.append(_launch(program, program.merge, program.merge_geometry))
    return ShippedWinner(tuple(launches), Rule.of(program.workspace_bytes, LENGTHS))


def _launch(program: Program, entry: Entry, geometry: Callable[[int], Geometry]) -> KernelLaunch:
    at = {tokens: geometry(tokens) for tokens in LENGTHS}
    constants = {tokens: program.constants(tokens) for tokens in LENGTHS}
    x, y, z = (Rule.of(lambda tokens, axis=axis: at[tokens].grid[axis], LENGTHS) for axis in range(3))  # type: ignore[misc]
    names = [parameter.name for parameter in entry.parameters if parameter.name in constants[LENGTHS[0]]]
    return KernelLaunch(
        entry.symbol,
        (x, y, z),
        at[LENGTHS[0]].threads,
        Rule.of(lambda tokens: at[tokens].shared_bytes, LENGTHS),
        {name: Rule.of(lambda tokens, name=name: constants[tokens][name], LENGTHS) for name in names},  # type: ignore[misc]
    )


def _image(shipped: Shipped, toolchain: str, arch: str) -> KernelImage:
    cubin = shipped.cubin
    return KernelImage(
        toolchain=toolchain,
        symbol=shipped.entry.symbol,
        arch=arch,
        ptx=shipped.ptx,
        cubin=cubin.image if cubin else b"",
        arguments=tuple((each.name, each.type) for each in shipped.entry.parameters),
        registers=cubin.registers if cubin else 0,
        spill_bytes=cubin.spill_store_bytes + cubin.spill_load_bytes if cubin else 0,
        shared_bytes=cubin.shared_bytes if cubin else 0,
    )
