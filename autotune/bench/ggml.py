"""ggml's public C functions through ctypes, from the shared libraries inside an installed wheel.

Only functions that the headers declare are used, and of the one structure that has to be passed, ``ggml_cplan``, only
its first two members, which are the same in every version: the size of the work buffer and its address.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.cpu.memory import huge_zeros
from .contestant import Absent

F32, F16, Q4_0, Q8_0, BF16 = 0, 1, 2, 8, 30
TYPES = {"f16": F16, "q4_0": Q4_0, "q8_0": Q8_0, "bf16": BF16}
MASK_ROWS = 64
"""Rows that a mask is padded to a multiple of: the most that any version asks for."""
_ROOM_BYTES = 1 << 20
_ALIGNMENT = 64
_WEIGHTS = 1  # GGML_BACKEND_BUFFER_USAGE_WEIGHTS

_POINTER, _SIZE, _LONG, _INT, _FLOAT = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int64,
    ctypes.c_int,
    ctypes.c_float,
)


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _POINTER), ("no_alloc", ctypes.c_bool))


class Plan(ctypes.Structure):
    """``ggml_cplan``, with room for whatever a version adds at its end."""

    _fields_ = (("work_size", _SIZE), ("work_data", _POINTER), ("rest", ctypes.c_uint8 * 240))


_FUNCTIONS: Mapping[str, tuple[Any, Sequence[Any]]] = {
    "ggml_init": (_POINTER, (_InitParams,)),
    "ggml_free": (None, (_POINTER,)),
    "ggml_new_tensor_4d": (_POINTER, (_POINTER, _INT, _LONG, _LONG, _LONG, _LONG)),
    "ggml_get_data": (_POINTER, (_POINTER,)),
    "ggml_nbytes": (_SIZE, (_POINTER,)),
    "ggml_row_size": (_SIZE, (_INT, _LONG)),
    "ggml_tensor_overhead": (_SIZE, ()),
    "ggml_graph_overhead": (_SIZE, ()),
    "ggml_quantize_chunk": (_SIZE, (_INT, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER)),
    "ggml_flash_attn_ext": (_POINTER, (_POINTER,) * 5 + (_FLOAT,) * 3),
    "ggml_mul_mat": (_POINTER, (_POINTER,) * 3),
    "ggml_new_graph": (_POINTER, (_POINTER,)),
    "ggml_build_forward_expand": (None, (_POINTER, _POINTER)),
    "ggml_graph_compute": (_INT, (_POINTER, ctypes.POINTER(Plan))),
}
_OPTIONAL: Mapping[str, tuple[Any, Sequence[Any]]] = {
    "ggml_cpu_init": (None, ()),
    "ggml_version": (ctypes.c_char_p, ()),
    "ggml_commit": (ctypes.c_char_p, ()),
    "ggml_backend_cpu_reg": (_POINTER, ()),
    "ggml_backend_reg_dev_get": (_POINTER, (_POINTER, _SIZE)),
    "ggml_backend_reg_get_proc_address": (_POINTER, (_POINTER, ctypes.c_char_p)),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, (_POINTER, _POINTER)),
    "ggml_backend_buft_name": (ctypes.c_char_p, (_POINTER,)),
    "ggml_backend_buft_alloc_buffer": (_POINTER, (_POINTER, _SIZE)),
    "ggml_backend_buft_get_alloc_size": (_SIZE, (_POINTER, _POINTER)),
    "ggml_backend_buffer_get_base": (_POINTER, (_POINTER,)),
    "ggml_backend_buffer_set_usage": (None, (_POINTER, _INT)),
    "ggml_backend_buffer_free": (None, (_POINTER,)),
    "ggml_backend_tensor_alloc": (_INT, (_POINTER, _POINTER, _POINTER)),
    "ggml_backend_tensor_set": (None, (_POINTER, _POINTER, _SIZE, _SIZE)),
}


class Ggml:
    """The functions of one wheel's ggml, as attributes without their ``ggml_``.

    Parameters
    ----------
    module : str
        Import name of the package, which is not imported.
    distribution : str
        Its name on the package index.
    libraries : sequence of str
        Stems of the shared libraries to load, in the order in which they need each other.
    pools : bool
        Whether ``ggml_graph_plan`` takes a thread pool.

    Raises
    ------
    Absent
        If the package is not installed, or its libraries cannot be loaded or lack a function.
    """

    def __init__(self, module: str, distribution: str, libraries: Sequence[str], pools: bool) -> None:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise Absent(f"not installed: pip install {distribution}")
        folder = Path(spec.origin).parent / "lib"
        self._libraries = [ctypes.CDLL(str(_library(folder, name))) for name in libraries]
        for name, (result, arguments) in _FUNCTIONS.items():
            setattr(self, name.removeprefix("ggml_"), self._function(name, result, arguments))
        for name, (result, arguments) in _OPTIONAL.items():
            found = self._find(name) is not None
            setattr(self, name.removeprefix("ggml_"), self._function(name, result, arguments) if found else None)
        self._plan = self._function("ggml_graph_plan", Plan, (_POINTER, _INT, *((_POINTER,) if pools else ())))
        self._pools = pools
        self.version_text = f"{distribution} {importlib.metadata.version(distribution)}"
        if self.version is not None:
            self.version_text += f" (ggml {self.version().decode()})"
        if self.cpu_init is not None:
            self.cpu_init()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # tells type checkers that functions are set by name

    def _find(self, name: str) -> Any:
        for library in self._libraries:
            try:
                return library[name]
            except AttributeError:
                continue
        return None

    def _function(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        function = self._find(name)
        if function is None:
            raise Absent(f"its ggml library has no {name}: another version than those that are known")
        function.restype, function.argtypes = result, list(arguments)
        return function

    def plan(self, graph: int, threads: int) -> Plan:
        plan: Plan = self._plan(graph, threads, *((None,) if self._pools else ()))
        return plan


def _library(folder: Path, stem: str) -> Path:
    found = sorted(each for suffix in ("so", "dylib", "dll") for each in folder.glob(f"*{stem}.{suffix}"))
    if not found:
        raise Absent(f"{folder} holds no {stem} library")
    return found[0]


class Graph:
    """Tensors in memory of their own, the operator on them, and its plan. Freed with it.

    Parameters
    ----------
    ggml : Ggml
    nbytes : int
        Room for the tensors' data.
    """

    def __init__(self, ggml: Ggml, nbytes: int) -> None:
        self.ggml = ggml
        size = nbytes + _ROOM_BYTES + ggml.graph_overhead()
        self._memory = huge_zeros(size)
        self.context: int = ggml.init(_InitParams(size, self._memory.ctypes.data, False))
        self._work = np.zeros(0, np.uint8)

    def tensor(self, kind: int, *shape: int) -> int:
        """A tensor; ``shape`` is in ggml's order, the contiguous axis first."""
        made: int = self.ggml.new_tensor_4d(self.context, kind, *shape, *(1,) * (4 - len(shape)))
        return made

    def bytes_of(self, tensor: int) -> NDArray[np.uint8]:
        """The tensor's data, to read and write."""
        size, address = self.ggml.nbytes(tensor), self.ggml.get_data(tensor)
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)

    def region(self, tensor: int) -> tuple[int, int]:
        return self.ggml.get_data(tensor), self.ggml.nbytes(tensor)

    def compile(self, output: int, threads: int) -> None:
        ggml = self.ggml
        self._graph = ggml.new_graph(self.context)
        ggml.build_forward_expand(self._graph, output)
        self._prepared = ggml.plan(self._graph, threads)
        self._work = np.zeros(self._prepared.work_size + _ALIGNMENT, np.uint8)
        self._prepared.work_data = self._work.ctypes.data + -self._work.ctypes.data % _ALIGNMENT
        self._reference = ctypes.byref(self._prepared)
        self._compute = ggml.graph_compute

    def run(self) -> None:
        """Compute.

        Raises
        ------
        RuntimeError
            If ggml reports a failure.
        """
        if self._compute(self._graph, self._reference):
            raise RuntimeError("ggml could not compute the graph")

    def __del__(self) -> None:
        if getattr(self, "context", None):
            self.ggml.free(self.context)


class WeightBuffer:
    """A matrix in one of a backend's special buffers, which arrange it anew for the machine; freed with it.

    Parameters
    ----------
    ggml : Ggml
    kind : int
        Handle from `weight_buffers`.
    data_type, columns, rows : int
    """

    def __init__(self, ggml: Ggml, kind: int, data_type: int, columns: int, rows: int) -> None:
        self._ggml = ggml
        self._context = ggml.init(_InitParams(ggml.tensor_overhead() + _ROOM_BYTES, None, True))
        self.tensor: int = ggml.new_tensor_4d(self._context, data_type, columns, rows, 1, 1)
        size = ggml.backend_buft_get_alloc_size(kind, self.tensor)
        self._buffer = ggml.backend_buft_alloc_buffer(kind, size)
        if not self._buffer:
            raise MemoryError(f"ggml could not allocate {size} bytes")
        base = ggml.backend_buffer_get_base(self._buffer)
        ggml.backend_buffer_set_usage(self._buffer, _WEIGHTS)
        ggml.backend_tensor_alloc(self._buffer, self.tensor, base)
        self.region: tuple[int, int] = (base, size)

    def fill(self, data: NDArray[np.uint8]) -> None:
        """Copy rows of plain blocks in."""
        self._ggml.backend_tensor_set(self.tensor, data.ctypes.data, 0, data.nbytes)

    def __del__(self) -> None:
        if getattr(self, "_buffer", None):
            self._ggml.backend_buffer_free(self._buffer)
        if getattr(self, "_context", None):
            self._ggml.free(self._context)


def weight_buffers(ggml: Ggml) -> dict[str, int]:
    """Handles of the CPU's special buffers for weights by name, in the order in which llama.cpp prefers them."""
    if ggml.backend_cpu_reg is None or ggml.backend_reg_get_proc_address is None:
        return {}
    registry = ggml.backend_cpu_reg()
    address = ggml.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return {}
    get = ctypes.CFUNCTYPE(ctypes.POINTER(_POINTER), _POINTER)(address)
    kinds, index = get(ggml.backend_reg_dev_get(registry, 0)), 0
    found: dict[str, int] = {}
    while kinds and kinds[index]:
        found[ggml.backend_buft_name(kinds[index]).decode()] = int(kinds[index])
        index += 1
    return found


def supports(ggml: Ggml, operation: int) -> bool:
    """Whether the CPU backend can compute ``operation`` on the buffers that its operands are in."""
    return bool(ggml.backend_dev_supports_op(ggml.backend_reg_dev_get(ggml.backend_cpu_reg(), 0), operation))
