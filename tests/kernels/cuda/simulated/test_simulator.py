"""Launches in the simulator: indices, warps, barriers, shared memory, and what goes wrong in kernels."""

import threading

import numpy as np
import pytest
from lowbit.kernels.cuda import memory, simulator
from lowbit.kernels.cuda.program import Entry, Geometry, Parameter
from lowbit.kernels.errors import DeviceError
from numba import cuda


def launch(function, out, geometry, **values):
    """Run ``function(address of out, *values)``, whose other arguments are int32."""
    parameters = (Parameter("out", "pointer"), *(Parameter(name, "int32") for name in values))
    with memory.registered(out):
        simulator.run(Entry("kernel", function, parameters), geometry, {"out": out.ctypes.data, **values})
    return out


def test_runs_as_the_simulator():
    assert simulator.simulating()


def indices(out):
    x = cuda.threadIdx.x + cuda.blockDim.x * (cuda.blockIdx.x + 2 * (cuda.blockIdx.y + 3 * cuda.blockIdx.z))
    memory.store_words(out + 4 * x, (1 + x,))


def test_every_thread_of_the_grid_runs_once():
    out = launch(indices, np.zeros(2 * 3 * 2 * 40, np.int32), Geometry((2, 3, 2), 40, 0))
    assert out.tolist() == list(range(1, 481))


def butterfly(out):
    thread = simulator.thread()
    total = thread.x
    for step in (16, 8, 4, 2, 1):
        total += simulator.exchange(total)[thread.lane ^ step]
    memory.store_words(out + 4 * thread.x, (total,))


def test_lanes_of_a_warp_exchange_values_among_themselves():
    out = launch(butterfly, np.zeros(96, np.int32), Geometry((1, 1, 1), 96, 0))
    assert out.tolist() == [sum(range(first, first + 32)) for first in (0, 32, 64) for _ in range(32)]


def transpose(out, rounds):
    """Write shared memory, read what the opposite thread wrote: both barriers are needed in every round."""
    thread = simulator.thread()
    base, size = simulator.shared_address(), cuda.blockDim.x
    total = 0
    for i in range(rounds):
        memory.store_words(base + 4 * thread.x, (thread.x + i,))
        cuda.syncthreads()
        total += memory.load_words(base + 4 * (size - 1 - thread.x), 1)[0]
        simulator.block_barrier()
    memory.store_words(out + 4 * thread.x, (total,))


def test_block_barriers_order_shared_memory():
    out = launch(transpose, np.zeros(64, np.int32), Geometry((1, 1, 1), 64, 256), rounds=3)
    assert out.tolist() == [3 * (63 - x) + 3 for x in range(64)]


def neighbour(out, step):
    """No barrier between the store and the load of a neighbour's word."""
    thread = simulator.thread()
    for _ in range(2):
        simulator.warp_barrier()
        memory.store_words(simulator.shared_address() + 4 * thread.x, (thread.x,))
        found = memory.load_words(simulator.shared_address() + 4 * ((thread.x + step) % 32), 1)[0]
        if found != (thread.x + step) % 32:
            memory.store_words(out + 4 * thread.x, (1,))


@pytest.mark.parametrize("step", [1, -1, 7, -7])
def test_a_missing_barrier_shows_whichever_way_threads_read(step):
    assert launch(neighbour, np.zeros(32, np.int32), Geometry((1, 1, 1), 32, 128), step=step).any()


def uninitialised(out):
    simulator.shared()[:4] = simulator.shared()[4:8]
    memory.store_words(out + 4 * cuda.blockIdx.x, memory.load_words(simulator.shared_address(), 1))
    simulator.shared()[:] = 0


def test_shared_memory_is_undefined_in_every_block():
    out = launch(uninitialised, np.zeros(3, np.int32), Geometry((3, 1, 1), 1, 8))
    assert np.isnan(out.view(np.float32)).all()


def numba_shared(out):
    words = cuda.shared.array(0, np.dtype(np.int32))
    words[cuda.threadIdx.x] = 7 * cuda.threadIdx.x
    cuda.syncthreads()
    memory.store_words(out + 4 * cuda.threadIdx.x, memory.load_words(simulator.shared_address() + 4 * cuda.laneid, 1))


def test_numbas_dynamic_shared_memory_is_the_same():
    out = launch(numba_shared, np.zeros(32, np.int32), Geometry((1, 1, 1), 32, 128))
    assert out.tolist() == [7 * x for x in range(32)]


def some_end(out):
    """Lanes end at different times while the others still exchange and meet."""
    thread = simulator.thread()
    seen = 0
    for _ in range(thread.x // 16):
        values = simulator.exchange(thread.x)
        seen += sum(value is not None for value in values)
        cuda.syncthreads()
    memory.store_words(out + 4 * thread.x, (seen,))


def test_barriers_do_not_wait_for_threads_that_ended():
    out = launch(some_end, np.zeros(64, np.int32), Geometry((1, 1, 1), 64, 0))
    # Warp 0: 16 lanes stay for one exchange. Warp 1: all take two, and half of them a third.
    assert out.tolist() == [0] * 16 + [16] * 16 + [64] * 16 + [80] * 16


def diverged(out):
    if cuda.threadIdx.x < 5:
        simulator.warp_barrier()
    else:
        cuda.syncthreads()


def test_threads_that_wait_for_each_other_are_an_error():
    with pytest.raises(simulator.BarrierError, match="5 at their warp's, 27 at the block's, of 32"):
        launch(diverged, np.zeros(1, np.int32), Geometry((1, 1, 1), 32, 0))


def skipped(out):
    """One lane goes on to the block's barrier, and the others wait for it at the warp's."""
    if cuda.threadIdx.x != 3:
        simulator.warp_barrier()
    cuda.syncthreads()


def test_a_lane_that_skips_a_barrier_is_an_error():
    with pytest.raises(simulator.BarrierError):
        launch(skipped, np.zeros(1, np.int32), Geometry((1, 1, 1), 32, 0))


def stray(out):
    simulator.warp_barrier()
    if cuda.threadIdx.x == 9 and cuda.blockIdx.x == 1:
        memory.store_words(out + 4, (1,))
    simulator.warp_barrier()


def past_shared(out):
    memory.store_words(simulator.shared_address() + 4 * cuda.threadIdx.x, (1,))


def test_an_error_in_one_thread_ends_the_launch():
    before = threading.active_count()
    with pytest.raises(memory.IllegalAccessError, match="at byte 4 of buffer of 4 bytes"):
        launch(stray, np.zeros(1, np.int32), Geometry((3, 1, 1), 64, 0))
    assert threading.active_count() == before
    launch(butterfly, np.zeros(32, np.int32), Geometry((1, 1, 1), 32, 0))


def test_accesses_past_shared_memory_are_illegal():
    launch(past_shared, np.zeros(1, np.int32), Geometry((1, 1, 1), 16, 64))
    with pytest.raises(memory.IllegalAccessError, match="at byte 64 of shared memory of 64 bytes"):
        launch(past_shared, np.zeros(1, np.int32), Geometry((1, 1, 1), 17, 64))


def test_arguments_keep_to_their_width():
    with pytest.raises(DeviceError, match="4294967296 does not fit the 32 bits"):
        launch(transpose, np.zeros(1, np.int32), Geometry((1, 1, 1), 1, 0), rounds=1 << 32)


def test_barriers_belong_to_launches():
    with pytest.raises(DeviceError, match="no simulated kernel"):
        simulator.exchange(1)
