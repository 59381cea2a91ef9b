"""A persistent fork/join pool for compiled tasks, cheap enough to fork several times per decoded token.

Workers are Python threads, each pinned to a core, that live inside compiled code: they spin on a generation counter and
claim task indices by compare-and-swap. After a bounded idle time they return to Python and block on a lock, so an idle
pool costs nothing. The calling thread takes part and never waits for a worker that has claimed nothing: on a crowded
machine it simply runs every task itself.

The ticket, one 64-bit word, holds the generation (upper half) and the next unclaimed index (lower half). A claim is a
compare-and-swap of the whole ticket, so it can only succeed while its generation still has an unclaimed task, which is
also as long as that generation's function and arguments stay valid. Before they are replaced the ticket is closed (its
lower half all ones), which fails every claim that read the new values against the old ticket.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compiled import for_any_host

_LINE = 16  # 64-bit words between two shared words: 128 bytes, so that neither a line nor its prefetched twin is shared
_IDLE_US = 500.0  # how long a worker spins before it blocks: longer than the gap between two layers of a small model
_STOP, _PARKED = 3 * _LINE, 4 * _LINE

_IR = """
{yield_declaration}
define internal void @relax() alwaysinline {{
  call void asm sideeffect "{pause}", "~{{memory}}"()
  ret void
}}

define void @inline(i64 %function, i64 %args, i64 %tasks) {{
entry:
  %f = inttoptr i64 %function to ptr
  %a = inttoptr i64 %args to ptr
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %tasks
  br i1 %more, label %body, label %done
body:
  call void %f(ptr %a, i64 %i)
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}}

define internal void @claim(ptr %s, i64 %rank) {{
entry:
  %done.p = getelementptr i64, ptr %s, i64 {done}
  %function.p = getelementptr i64, ptr %s, i64 {function}
  %args.p = getelementptr i64, ptr %function.p, i64 1
  %tasks.p = getelementptr i64, ptr %function.p, i64 2
  %limit.p = getelementptr i64, ptr %function.p, i64 3
  br label %head
head:
  %ticket = load atomic i64, ptr %s acquire, align 8
  %index = and i64 %ticket, 4294967295
  %function = load atomic i64, ptr %function.p acquire, align 8
  %args = load atomic i64, ptr %args.p acquire, align 8
  %tasks = load atomic i64, ptr %tasks.p acquire, align 8
  %limit = load atomic i64, ptr %limit.p acquire, align 8
  %left = icmp ult i64 %index, %tasks
  %mine = icmp ult i64 %rank, %limit
  %go = and i1 %left, %mine
  br i1 %go, label %try, label %out
try:
  %next = add i64 %ticket, 1
  %pair = cmpxchg ptr %s, i64 %ticket, i64 %next seq_cst seq_cst
  %won = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %won, label %work, label %head
work:
  %f = inttoptr i64 %function to ptr
  %a = inttoptr i64 %args to ptr
  call void %f(ptr %a, i64 %index)
  %count = atomicrmw add ptr %done.p, i64 1 seq_cst
  br label %head
out:
  ret void
}}

; Opens a generation; returns how many workers are parked.
define i64 @publish(ptr %s, i64 %function, i64 %args, i64 %tasks, i64 %limit) {{
entry:
  %done.p = getelementptr i64, ptr %s, i64 {done}
  %function.p = getelementptr i64, ptr %s, i64 {function}
  %args.p = getelementptr i64, ptr %function.p, i64 1
  %tasks.p = getelementptr i64, ptr %function.p, i64 2
  %limit.p = getelementptr i64, ptr %function.p, i64 3
  %old = load atomic i64, ptr %s acquire, align 8
  %closed = or i64 %old, 4294967295
  store atomic i64 %closed, ptr %s seq_cst, align 8
  store atomic i64 %function, ptr %function.p release, align 8
  store atomic i64 %args, ptr %args.p release, align 8
  store atomic i64 %tasks, ptr %tasks.p release, align 8
  store atomic i64 %limit, ptr %limit.p release, align 8
  store atomic i64 0, ptr %done.p release, align 8
  %open = add i64 %closed, 1
  store atomic i64 %open, ptr %s seq_cst, align 8
  br label %head
head:
  %rank = phi i64 [ 1, %entry ], [ %rank.next, %body ]
  %parked = phi i64 [ 0, %entry ], [ %parked.next, %body ]
  %more = icmp ult i64 %rank, %limit
  br i1 %more, label %body, label %end
body:
  %line = mul i64 %rank, {line}
  %word = add i64 %line, {parked}
  %flag.p = getelementptr i64, ptr %s, i64 %word
  %flag = load atomic i64, ptr %flag.p seq_cst, align 8
  %parked.next = add i64 %parked, %flag
  %rank.next = add i64 %rank, 1
  br label %head
end:
  ret i64 %parked
}}

; Takes a worker's parked flag: 1 if it was parked and the taker owes it a wake-up.
define i64 @unpark(ptr %s, i64 %rank) {{
  %line = mul i64 %rank, {line}
  %word = add i64 %line, {parked}
  %flag.p = getelementptr i64, ptr %s, i64 %word
  %flag = atomicrmw xchg ptr %flag.p, i64 0 seq_cst
  ret i64 %flag
}}

; The caller's share of a generation, then the wait for the workers' claimed tasks.
define void @join(ptr %s) {{
entry:
  call void @claim(ptr %s, i64 0)
  %done.p = getelementptr i64, ptr %s, i64 {done}
  %tasks.p = getelementptr i64, ptr %s, i64 {tasks}
  %tasks = load atomic i64, ptr %tasks.p acquire, align 8
  br label %head
head:
  %spun = phi i64 [ 0, %entry ], [ %next, %wait ], [ 0, %polite ]
  %count = load atomic i64, ptr %done.p acquire, align 8
  %finished = icmp eq i64 %count, %tasks
  br i1 %finished, label %end, label %wait
wait:
  call void @relax()
  %next = add i64 %spun, 1
  %long = icmp ugt i64 %next, 512
  br i1 %long, label %polite, label %head
polite:
  {yield_call}
  br label %head
end:
  ret void
}}

; A call from a block of its arguments: the prologue inline, then the tasks. Returns how many workers are parked; if any
; are, the tasks are published and the caller has to wake the workers and to join.
define i64 @call(ptr %b) {{
entry:
  %turns.p = getelementptr i64, ptr %b, i64 6
  %prologue.p = getelementptr i64, ptr %b, i64 5
  %limit.p = getelementptr i64, ptr %b, i64 4
  %tasks.p = getelementptr i64, ptr %b, i64 3
  %args.p = getelementptr i64, ptr %b, i64 2
  %function.p = getelementptr i64, ptr %b, i64 1
  %state = load i64, ptr %b
  %function = load i64, ptr %function.p
  %args = load i64, ptr %args.p
  %tasks = load i64, ptr %tasks.p
  %limit = load i64, ptr %limit.p
  %prologue = load i64, ptr %prologue.p
  %turns = load i64, ptr %turns.p
  call void @inline(i64 %prologue, i64 %args, i64 %turns)
  %alone = icmp ule i64 %limit, 1
  br i1 %alone, label %here, label %fork
here:
  call void @inline(i64 %function, i64 %args, i64 %tasks)
  ret i64 0
fork:
  %s = inttoptr i64 %state to ptr
  %parked = call i64 @publish(ptr %s, i64 %function, i64 %args, i64 %tasks, i64 %limit)
  %awake = icmp eq i64 %parked, 0
  br i1 %awake, label %share, label %wake
share:
  call void @join(ptr %s)
  ret i64 0
wake:
  ret i64 %parked
}}

; A sequence of stages of four words each: function, arguments, tasks, threads. Each one ends before the next begins. A
; worker that is parked is not waited for: it joins once it has been woken.
define void @sequence(ptr %s, ptr %stages, i64 %count) {{
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %after ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %body, label %end
body:
  %first = mul i64 %i, 4
  %function.p = getelementptr i64, ptr %stages, i64 %first
  %args.p = getelementptr i64, ptr %function.p, i64 1
  %tasks.p = getelementptr i64, ptr %function.p, i64 2
  %limit.p = getelementptr i64, ptr %function.p, i64 3
  %function = load i64, ptr %function.p
  %args = load i64, ptr %args.p
  %tasks = load i64, ptr %tasks.p
  %limit = load i64, ptr %limit.p
  %one.thread = icmp ule i64 %limit, 1
  %one.task = icmp ule i64 %tasks, 1
  %alone = or i1 %one.thread, %one.task
  br i1 %alone, label %here, label %fork
here:
  call void @inline(i64 %function, i64 %args, i64 %tasks)
  br label %after
fork:
  %parked = call i64 @publish(ptr %s, i64 %function, i64 %args, i64 %tasks, i64 %limit)
  call void @join(ptr %s)
  br label %after
after:
  %next = add i64 %i, 1
  br label %head
end:
  ret void
}}

; A worker's life between two parkings: 1 to be called again, 0 to block until woken.
define i64 @serve(ptr %s, i64 %rank, i64 %spins) {{
entry:
  %stop.p = getelementptr i64, ptr %s, i64 {stop}
  %line = mul i64 %rank, {line}
  %word = add i64 %line, {parked}
  %flag.p = getelementptr i64, ptr %s, i64 %word
  br label %start
start:
  %ticket = load atomic i64, ptr %s acquire, align 8
  %generation = lshr i64 %ticket, 32
  call void @claim(ptr %s, i64 %rank)
  br label %spin
spin:
  %spun = phi i64 [ 0, %start ], [ %next, %idle ]
  %seen = load atomic i64, ptr %s acquire, align 8
  %seen.generation = lshr i64 %seen, 32
  %same = icmp eq i64 %seen.generation, %generation
  br i1 %same, label %idle, label %start
idle:
  call void @relax()
  %stopping = load atomic i64, ptr %stop.p acquire, align 8
  %next = add i64 %spun, 1
  %long = icmp ugt i64 %next, %spins
  %leave = icmp ne i64 %stopping, 0
  %give.up = or i1 %long, %leave
  br i1 %give.up, label %park, label %spin
park:
  %was = atomicrmw xchg ptr %flag.p, i64 1 seq_cst
  %again = load atomic i64, ptr %s seq_cst, align 8
  %again.generation = lshr i64 %again, 32
  %quiet = icmp eq i64 %again.generation, %generation
  br i1 %quiet, label %block, label %withdraw
withdraw:
  %mine = atomicrmw xchg ptr %flag.p, i64 0 seq_cst
  ret i64 %mine
block:
  ret i64 0
}}

; `spins` turns of an idle worker's loop, to learn how long one takes.
define void @pace(ptr %s, i64 %spins) {{
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %head ]
  %seen = load atomic i64, ptr %s acquire, align 8
  call void @relax()
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %spins
  br i1 %more, label %head, label %end
end:
  ret void
}}
"""


class Pool:
    """Fork/join over ``threads`` threads, the caller being one of them.

    Made by `pool`. Calls from several Python threads are serialised. A task must not call back into the pool that runs
    it. After a fork the child's pool has no workers until it runs something; at interpreter exit they end, and the
    caller runs every task.

    Parameters
    ----------
    threads : int
        Threads that share the tasks; more than the cores is allowed, and then idle workers block at once.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a pool needs at least one thread, not {threads}")
        self.threads = threads
        self._stopped = False
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._workers: list[tuple[threading.Thread, threading.Lock]] = []
        words = _PARKED + (self.threads + 1) * _LINE
        self._memory = (ctypes.c_int64 * words)()
        start = ctypes.addressof(self._memory)
        self._state = start + -start % (8 * _LINE)

    def run(self, function_address: int, args_address: int, tasks: int, threads: int | None = None) -> None:
        """Call ``void f(void *args, int64_t index)`` once for every index in ``[0, tasks)`` and wait for all.

        Parameters
        ----------
        function_address, args_address : int
            The compiled task, which must not need the interpreter lock nor raise, and the pointer passed to it.
        tasks : int
            Below 2**31.
        threads : int, optional
            Use at most this many of the pool's threads; 1 runs every task inline, in order.

        Raises
        ------
        ValueError
            If a count is out of range or the function is null.
        """
        limit = self.threads if threads is None else min(threads, self.threads)
        if not 0 <= tasks < 2**31 or limit < 1 or not function_address:
            raise ValueError(f"cannot run {tasks} tasks of function {function_address:#x} on {limit} threads")
        native = _native()
        limit = min(limit, tasks)
        if limit <= 1:
            native.inline(function_address, args_address, tasks)
            return
        with self._lock:
            if not self._workers and not self._stopped:
                self._start(native)
            # An interrupt between publishing and joining must not free arguments that workers still read.
            try:
                if native.publish(self._state, function_address, args_address, tasks, limit):
                    self._wake(native, limit)
            finally:
                native.join(self._state)

    def bind(
        self, function_address: int, args_address: int, tasks: int, prologue_address: int = 0, turns: int = 0
    ) -> Callable[[], None]:
        """What `run` does, with everything looked up once: the cheapest way to repeat a call.

        Parameters
        ----------
        function_address, args_address, tasks : int
            See `run`.
        prologue_address, turns : int, optional
            A task function that the calling thread runs first, with the same argument and the indices 0 … turns − 1.
        """
        if not 0 <= tasks < 2**31 or not function_address or (turns and not prologue_address):
            raise ValueError(f"cannot run {tasks} tasks of function {function_address:#x}")
        native, state = _native(), self._state
        limit = min(self.threads, tasks)
        arguments = (ctypes.c_int64 * 7)(state, function_address, args_address, tasks, limit, prologue_address, turns)
        # The address is a number, which ctypes converts faster; the default holds on to the block.
        call, address = native.call, ctypes.addressof(arguments)

        def run(memory: object = (arguments, self._memory)) -> None:
            if state != self._state:  # a fork has left these words to its parent
                arguments[0] = self._state
            if limit <= 1:
                call(address)
                return
            with self._lock:
                if not self._workers and not self._stopped:
                    self._start(native)
                parked = 1
                try:
                    parked = call(address)
                    if parked:
                        self._wake(native, limit)
                finally:
                    if parked:
                        native.join(self._state)

        return run

    def sequence(self, stages: NDArray[np.int64]) -> Callable[[], None]:
        """Run a program: compiled stages one after the other, with no Python between them.

        Parameters
        ----------
        stages : ndarray of int64, shape (stages, 4)
            C-contiguous: address of a task function, of its argument, number of tasks, and most threads; 1 runs the
            tasks inline, in order, and none may exceed the pool's. Read anew at each call, so that entries may change
            between calls.

        Returns
        -------
        callable
            Runs the stages; keeps ``stages`` alive.
        """
        if stages.ndim != 2 or stages.shape[1] != 4 or stages.dtype != np.int64 or not stages.flags.c_contiguous:
            raise ValueError("stages must be a contiguous int64 array of shape (stages, 4)")
        if len(stages) and not stages[:, 0].all():
            raise ValueError(f"stage {int(np.argmin(stages[:, 0] != 0))} has no function")
        if len(stages) and stages[:, 3].max() > self.threads:
            raise ValueError(f"a stage asks for {stages[:, 3].max()} threads of {self.threads}")
        native, address, count = _native(), stages.ctypes.data, len(stages)

        def run(memory: object = (stages, self._memory)) -> None:
            with self._lock:
                if self.threads > 1:
                    if not self._workers and not self._stopped:
                        self._start(native)
                    self._wake(native, self.threads)
                native.sequence(self._state, address, count)

        return run

    def _start(self, native: _Native) -> None:
        cpus = allowed_cpus()
        spins = 0 if self.threads > len(cpus) else native.idle_spins(self._state)
        for rank in range(1, self.threads):
            gate = threading.Lock()
            gate.acquire()
            cpu = cpus[rank % len(cpus)]
            arguments = (native, self._state, self._memory, rank, spins, gate, cpu)
            thread = threading.Thread(target=_live, args=arguments, name=f"lowbit-{rank}", daemon=True)
            thread.start()
            self._workers.append((thread, gate))

    def _wake(self, native: _Native, limit: int) -> None:
        for rank, (_, gate) in enumerate(self._workers[: limit - 1], 1):
            if native.unpark(self._state, rank):
                gate.release()

    def stop(self) -> None:
        """End the workers; whatever runs later runs on its caller alone."""
        with self._lock:
            self._stopped = True
            if not self._workers:
                return
            native = _native()
            ctypes.c_int64.from_address(self._state + 8 * _STOP).value = 1
            deadline = time.monotonic() + 1.0
            for rank, (thread, gate) in enumerate(self._workers, 1):
                # A worker may be on its way to park: keep offering the wake-up until it is gone.
                while thread.is_alive() and time.monotonic() < deadline:
                    if native.unpark(self._state, rank):
                        gate.release()
                    thread.join(0.001)
            self._workers.clear()


def _live(native: _Native, state: int, memory: object, rank: int, spins: int, gate: threading.Lock, cpu: int) -> None:
    """A worker thread's body; it holds ``memory`` so that the shared words outlive it."""
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, {cpu})
    stop = ctypes.c_int64.from_address(state + 8 * _STOP)
    while not stop.value:
        if not native.serve(state, rank, spins):
            gate.acquire()


class _Native:
    """The compiled half, called through ctypes, which releases the interpreter lock."""

    def __init__(self) -> None:
        pause = {"x86_64": "pause", "AMD64": "pause", "aarch64": "yield", "arm64": "yield"}
        posix = os.name == "posix"
        text = _IR.format(
            pause=pause.get(platform.machine(), ""),
            yield_declaration="declare i32 @sched_yield()" if posix else "",
            yield_call="%ignored = call i32 @sched_yield()" if posix else "call void @relax()",
            done=_LINE,
            function=2 * _LINE,
            tasks=2 * _LINE + 2,
            stop=_STOP,
            parked=_PARKED,
            line=_LINE,
        )
        word, nothing = ctypes.c_int64, None
        signatures: dict[str, tuple[Any, ...]] = {
            "inline": (nothing, word, word, word),
            "publish": (word, word, word, word, word, word),
            "unpark": (word, word, word),
            "join": (nothing, word),
            "serve": (word, word, word, word),
            "pace": (nothing, word, word),
            "call": (word, word),
            "sequence": (nothing, word, word, word),
        }
        addresses = for_any_host(tuple(signatures), text)
        functions = [
            ctypes.CFUNCTYPE(*signature)(address)
            for signature, address in zip(signatures.values(), addresses, strict=True)
        ]
        self.inline, self.publish, self.unpark, self.join, self.serve, self.pace, self.call, self.sequence = functions

    def idle_spins(self, state: int) -> int:
        """Turns of the idle loop that last `_IDLE_US`."""
        turns, best = 500, float("inf")
        for _ in range(3):
            started = time.perf_counter()
            self.pace(state, turns)
            best = min(best, time.perf_counter() - started)
        return max(int(_IDLE_US * 1e-6 / best * turns), 1)


_native = functools.cache(_Native)
_pools: dict[int, Pool] = {}
_pools_lock = threading.Lock()


def pool(threads: int) -> Pool:
    """The process's pool of ``threads`` threads. Its workers start with its first parallel run."""
    with _pools_lock:
        if threads not in _pools:
            allowed_cpus()
            _pools[threads] = Pool(threads)
        return _pools[threads]


def run(function_address: int, args_address: int, tasks: int, threads: int) -> None:
    """`Pool.run` on the pool of ``threads`` threads."""
    pool(threads).run(function_address, args_address, tasks)


@functools.cache
def allowed_cpus() -> tuple[int, ...]:
    """The logical CPUs that this process may use, the first of each physical core before their siblings.

    Read once, at the first pool or pinning, so that a calling thread pinned by `pinned` does not narrow it.
    """
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    seen: dict[str, int] = {}
    ranked = []
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            core = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            core = str(cpu)
        ranked.append((seen.setdefault(core, 0), cpu))
        seen[core] += 1
    return tuple(cpu for _, cpu in sorted(ranked))


@contextmanager
def pinned() -> Iterator[None]:
    """Pin the calling thread to the core that pools leave to their caller, and restore its affinity afterwards.

    Does nothing where the system has no thread affinity.
    """
    cpus = allowed_cpus()
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, {cpus[0]})
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def _stop_all() -> None:
    for each in _pools.values():
        each.stop()


def _reset_all() -> None:
    global _pools_lock
    _pools_lock = threading.Lock()
    for each in _pools.values():
        each._reset()


atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
