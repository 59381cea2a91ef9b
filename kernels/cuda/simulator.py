"""Launches on the CPU: numba-cuda's simulator with warps.

Under ``NUMBA_ENABLE_CUDASIM=1`` Numba runs kernels as Python functions, a thread of the host for each CUDA thread. Its
own runner has no warps, polls its threads, and gives all blocks one shared memory. This one hands a single turn from
thread to thread: a thread runs until it waits at a barrier of its warp or block or ends, so that a launch is
deterministic, and threads that wait for each other are an error instead of a hang. Grid and thread indices are Numba's
(``cuda.threadIdx``, ``cuda.blockIdx``, ``cuda.syncthreads``).

What kernels do besides indices and barriers, their Python meaning does through these functions, from within a launch:

    thread() -> Lane           .x (index in the block), .lane (0 to 31), .warp, .block (x, y, z of the grid)
    exchange(value) -> list    what the 32 lanes of the warp passed, None for lanes that ended; not to be changed
    warp_barrier()             every lane of the warp that has not ended
    block_barrier()            every thread of the block that has not ended
    shared() -> ndarray        the block's dynamic shared memory as uint8, undefined (0xff) at the start of a block
    shared_address() -> int    where that lies: `memory.load_words(shared_address() + offset, 4)` is a checked access

Threads are resumed from a barrier in the order of their index and in its reverse by turns: whoever reads what another
thread has not yet written finds it missing in one of the two.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError
from . import memory
from .mapping import LANES

if TYPE_CHECKING:
    from .program import Entry, Geometry

UNDEFINED = 0xFF
"""What shared memory is filled with: not a number in every float format."""

_GUARD_BYTES = 256
"""Between shared memory and whatever lies next to it, so that a run past its end meets no other buffer."""

_one_launch = threading.Lock()
_current: Lane | None = None
"""The thread whose turn it is."""


class BarrierError(DeviceError):
    """Threads of a block wait at different barriers, each for the other."""


class _AbandonedError(BaseException):
    """Ends the threads of a launch in which another one failed."""


def simulating() -> bool:
    """Whether numba-cuda runs kernels on the CPU in this process (``NUMBA_ENABLE_CUDASIM=1`` when it was imported)."""
    try:
        from numba import config
    except ImportError:
        return False
    return bool(config.ENABLE_CUDASIM)


class _Group:
    """Threads that share a barrier: a warp or a block."""

    __slots__ = ("alive", "deposits", "published", "reverse", "waiting")

    def __init__(self, size: int):
        self.alive = size
        self.waiting: list[Lane] = []
        self.deposits: list[Any] = [None] * LANES
        self.published: list[Any] = self.deposits
        self.reverse = False

    def released(self) -> list[Lane]:
        """Those who waited, in the order they resume in, if nobody is missing any more."""
        if not self.waiting or len(self.waiting) < self.alive:
            return []
        self.published, self.deposits = self.deposits, [None] * LANES
        woken, self.waiting = sorted(self.waiting, key=lambda lane: lane.x, reverse=self.reverse), []
        self.reverse = not self.reverse
        return woken


class Lane(threading.Thread):
    """The host thread that runs one CUDA thread of every block of a launch, one block after another."""

    def __init__(self, launch: _Launch, x: int):
        super().__init__(daemon=True)
        self.x = self.thread_id = x
        self.warp, self.lane = divmod(x, LANES)
        self.block = (0, 0, 0)
        self.threadIdx: Any = None  # Numba's names and types for the same
        self.blockIdx: Any = None
        self.launch = launch
        self.turn = threading.Lock()
        self.turn.acquire()

    def run(self) -> None:
        """Run each block's thread when its turn comes; a launch that is over has no body left."""
        global _current
        while True:
            self.turn.acquire()
            body = self.launch.body
            if body is None:
                return
            _current = self
            try:
                body()
            except _AbandonedError:
                return
            except BaseException as error:
                self.launch.fail(error)
                return
            self.launch.ended(self)

    def syncthreads(self) -> None:
        """Numba's ``cuda.syncthreads()``."""
        self.launch.wait(self, self.launch.block)


class _Launch:
    """The threads of a launch and whose turn it is: always exactly one thread's, or the one's that launched."""

    def __init__(self, threads: int):
        self.body: Callable[[], None] | None = None
        self.main_turn = threading.Lock()
        self.main_turn.acquire()
        self.failure: BaseException | None = None
        self.lanes = [Lane(self, x) for x in range(threads)]
        self.ready: deque[Lane] = deque()
        self.block = _Group(0)
        self.warps: list[_Group] = []
        self.shared = np.empty(0, np.uint8)
        self.shared_address = 0
        self.running = 0

    def run_block(self, body: Callable[[], None], block: tuple[int, int, int]) -> None:
        threads = len(self.lanes)
        self.body = body
        self.block = _Group(threads)
        self.warps = [_Group(min(LANES, threads - first)) for first in range(0, threads, LANES)]
        self.running = threads
        self.shared[:] = UNDEFINED
        for lane in self.lanes:
            lane.block = block
        self.ready.extend(self.lanes[1:])
        self.lanes[0].turn.release()
        try:
            self.main_turn.acquire()
        except BaseException as interrupt:
            self.failure = interrupt
            raise
        if self.failure is not None:
            raise self.failure

    def wait(self, lane: Lane, group: _Group) -> None:
        """Stop ``lane`` until all of ``group`` have come here."""
        if self.failure is not None:
            raise _AbandonedError
        group.waiting.append(lane)
        self.ready.extend(group.released())
        if not self.ready:
            raise BarrierError(f"threads of block {lane.block} wait at different barriers: {self._waiting()}")
        global _current
        successor = self.ready.popleft()
        if successor is not lane:
            successor.turn.release()
            lane.turn.acquire()
            if self.failure is not None:
                raise _AbandonedError
            _current = lane

    def ended(self, lane: Lane) -> None:
        """``lane`` is through with its block: its groups no longer wait for it."""
        self.running -= 1
        for group in (self.warps[lane.warp], self.block):
            group.alive -= 1
            self.ready.extend(group.released())
        if self.ready:
            self.ready.popleft().turn.release()
        elif self.running:
            self.fail(BarrierError(f"threads of block {lane.block} wait at different barriers: {self._waiting()}"))
        else:
            self.main_turn.release()

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self.main_turn.release()

    def _waiting(self) -> str:
        warps = sum(len(warp.waiting) for warp in self.warps)
        return f"{warps} at their warp's, {len(self.block.waiting)} at the block's, of {self.running}"

    def close(self) -> None:
        """End the host threads: those in the middle of a block are unwound, one at a time."""
        global _current
        self.body = _current = None
        for lane in self.lanes:
            if not lane.is_alive():
                continue
            lane.turn.release()
            if self.failure is not None:
                lane.join()
        for lane in self.lanes:
            lane.join()


def run(entry: Entry, geometry: Geometry, values: Mapping[str, int | float]) -> None:
    """Run every block of a launch; the operands must be registered with `memory.registered`.

    Parameters
    ----------
    entry : Entry
    geometry : Geometry
    values : mapping
        A number for each of the entry's parameters.

    Raises
    ------
    IllegalAccessError
        For an access outside registered memory.
    BarrierError
        If threads wait for each other at different barriers.
    DeviceError
        If numba-cuda does not run as its simulator.
    """
    if not simulating():
        raise DeviceError("kernels run on the CPU only under NUMBA_ENABLE_CUDASIM=1")
    from numba.cuda.simulator.kernel import _push_kernel_context, swapped_cuda_module
    from numba.cuda.simulator.kernelapi import FakeCUDAModule

    function = getattr(entry.function, "py_func", entry.function)
    arguments = [_argument(parameter.type, values[parameter.name]) for parameter in entry.parameters]
    block_dim = (geometry.threads, 1, 1)
    numba_module = FakeCUDAModule(geometry.grid, block_dim, 0)
    with _one_launch:
        launch = _Launch(geometry.threads)
        launch.shared = _shared(geometry.shared_bytes)
        launch.shared_address = launch.shared.ctypes.data
        numba_module._shared._dynshared = launch.shared.view(np.byte)
        numba_module._shared._dynshared_size = geometry.shared_bytes
        region = memory.Region(launch.shared_address, geometry.shared_bytes, name="shared memory")
        for lane in launch.lanes:
            lane.start()
        try:
            with (
                memory.registered(region),
                _push_kernel_context(numba_module),
                swapped_cuda_module(function, numba_module),
            ):
                for z, y, x in itertools.product(*(range(extent) for extent in reversed(geometry.grid))):
                    _place(launch, (x, y, z))
                    launch.run_block(lambda: function(*arguments), (x, y, z))
        finally:
            launch.close()


def _argument(kind: str, value: int | float) -> int | float:
    """What a kernel is passed: 32 bits stay 32 bits."""
    if kind == "float32":
        return float(np.float32(value))
    bits = 32 if kind == "int32" else 64
    whole = int(value)
    if not -(1 << (bits - 1)) <= whole < 1 << (bits - 1):
        raise DeviceError(f"{value} does not fit the {bits} bits of a kernel's argument")
    return whole


def _shared(size: int) -> NDArray[np.uint8]:
    """Dynamic shared memory, aligned as on a GPU."""
    raw = np.empty(size + 2 * _GUARD_BYTES, np.uint8)
    start = _GUARD_BYTES - raw.ctypes.data % 128
    return raw[start : start + size]


def _place(launch: _Launch, block: tuple[int, int, int]) -> None:
    """Tell the threads their indices, in Numba's terms."""
    from numba.cuda.simulator.kernelapi import Dim3

    index = Dim3(*block)
    for lane in launch.lanes:
        lane.threadIdx, lane.blockIdx = Dim3(lane.x, 0, 0), index


# -- from within a launch --------------------------------------------------------------------------------------------


def thread() -> Lane:
    """The thread that runs."""
    if _current is None:
        raise DeviceError("no simulated kernel runs in this thread")
    return _current


def exchange(value: Any) -> list[Any]:
    """Pass ``value`` to the other lanes of the warp, and take what they passed: lane i's is element i."""
    lane = thread()
    warp = lane.launch.warps[lane.warp]
    warp.deposits[lane.lane] = value
    lane.launch.wait(lane, warp)
    return warp.published


def warp_barrier() -> None:
    lane = thread()
    lane.launch.wait(lane, lane.launch.warps[lane.warp])


def block_barrier() -> None:
    lane = thread()
    lane.launch.wait(lane, lane.launch.block)


def shared() -> NDArray[np.uint8]:
    return thread().launch.shared


def shared_address() -> int:
    return thread().launch.shared_address
