"""Runs a candidate's compiled PTX on operands, on the machine of `ptx_machine`."""

import numpy as np
from lowbit.kernels.cuda import program, ptx
from lowbit.kernels.packed import SLACK_BYTES
from ptx_machine import Buffers, run


def run_compiled(problem, candidate, x, packed, arch="sm_86", tokens=None):
    """What the kernels write for ``x`` and the packed operands, by role; NaN where they write nothing."""
    built = program.build(problem, candidate, arch)
    first = next(iter(packed.values()))
    count = first.tokens if tokens is None else tokens
    shape = (problem.heads, problem.query_rows, count if problem.operator in ("qk", "gemv") else problem.head_dim)
    arrays = {"x": np.ascontiguousarray(x, np.float32), "out": np.zeros(shape, np.float32)}
    arrays["partials"] = np.zeros(built.workspace_bytes(count), np.uint8)
    strides = {}
    for role, operand in packed.items():
        arrays[f"{role}_words"], arrays[f"{role}_scales"] = operand.words, operand.scales
        strides[f"{role}_stride"] = operand.words.strides[0]
        strides[f"{role}_scale_stride"] = operand.scales.strides[0]
    buffers = Buffers(arrays, frozenset({"out", "partials"}), SLACK_BYTES)
    for name in ("out", "partials"):
        buffers.undefine(name)
    values = {**built.constants(count), **buffers.addresses, **strides}
    launches = [(built.main, built.geometry(count))]
    if built.merge is not None:
        launches.append((built.merge, built.merge_geometry(count)))
    for entry, geometry in launches:
        arguments = [values[parameter.name] for parameter in entry.parameters]
        text = ptx.compile_entry(entry, arch)
        run(text, geometry.grid, geometry.threads, geometry.shared_bytes, arguments, buffers, entry.symbol)
    return buffers.read("out")
