"""Synthetic loops whose instruction mix is known and that are not the operators being ranked.

Each loop streams vectors from a buffer and does one thing to them: nothing, shifts, widening, dot products, … or a few
things together. They are written as LLVM IR for the instruction set that kernels use and compiled for the host; their
instructions are counted in their own assembly exactly as the kernels' are, so that the fit and what it later prices
speak the same language. No IR optimisation runs, hence one iteration of the IR's loop is one iteration in the assembly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..kernels.cpu.isa import Isa

SCRATCH_BYTES = 4096
"""Small operands, and the store loop's target, of each task."""

PREFETCHED_BYTES = 64
"""One prefetch for so many bytes of a stream: a line on nearly all machines, half a line on the others."""

# The stream comes first: that is the argument whose data counts as packed words.
_FUNCTION = """
define void @{name}_loop(ptr %data, ptr %scratch, ptr %out, i64 %bytes, i64 %passes) {{
entry:
  %part = udiv i64 %bytes, {streams}
  br label %pass
pass:
  %p = phi i64 [ 0, %entry ], [ %p.next, %flush ]
  br label %loop
loop:
  %i = phi i64 [ 0, %pass ], [ %i.next, %loop ]
{phis}
  %at = getelementptr i8, ptr %data, i64 %i
{starts}
{body}
  %i.next = add i64 %i, {step}
  %more = icmp ult i64 %i.next, %part
  br i1 %more, label %loop, label %flush
flush:
{flush}
  %p.next = add i64 %p, 1
  %again = icmp ult i64 %p.next, %passes
  br i1 %again, label %pass, label %end
end:
  ret void
}}

define void @{name}(ptr %args, i64 %index) {{
  %bytes.p = getelementptr i64, ptr %args, i64 1
  %passes.p = getelementptr i64, ptr %args, i64 2
  %scratch.p = getelementptr i64, ptr %args, i64 3
  %out.p = getelementptr i64, ptr %args, i64 4
  %base = load ptr, ptr %args
  %bytes = load i64, ptr %bytes.p
  %passes = load i64, ptr %passes.p
  %scratch.base = load ptr, ptr %scratch.p
  %out.base = load ptr, ptr %out.p
  %start = mul i64 %index, %bytes
  %data = getelementptr i8, ptr %base, i64 %start
  %scratch.start = mul i64 %index, {scratch}
  %scratch = getelementptr i8, ptr %scratch.base, i64 %scratch.start
  %out.start = mul i64 %index, 128
  %out = getelementptr i8, ptr %out.base, i64 %out.start
  call void @{name}_loop(ptr %data, ptr %scratch, ptr %out, i64 %bytes, i64 %passes)
  ret void
}}
"""


@dataclass
class Body:
    """Writes one loop's body as IR text; values are SSA names, vectors are `ints` unless said otherwise."""

    isa: Isa
    lines: list[str] = field(default_factory=list)
    sums: dict[int, tuple[str, str]] = field(default_factory=dict)
    declares: set[str] = field(default_factory=set)
    offsets: dict[int, int] = field(default_factory=dict)
    values: int = 0
    exponentials: int = 0
    streams: int = 1
    ahead_bytes: int = 0

    @property
    def lanes(self) -> int:
        return self.isa.lanes

    @property
    def ints(self) -> str:
        return f"<{self.lanes} x i32>"

    @property
    def floats(self) -> str:
        return f"<{self.lanes} x float>"

    @property
    def codes(self) -> str:
        return f"<{4 * self.lanes} x i8>"

    def let(self, expression: str) -> str:
        self.lines.append(f"  %v{len(self.lines)} = {expression}")
        return f"%v{len(self.lines) - 1}"

    def splat(self, type_: str, value: int | float) -> str:
        count, element = type_[1:-1].split(" x ")
        text = f"{value:.17e}" if element == "float" else str(value)
        return "<" + ", ".join([f"{element} {text}"] * int(count)) + ">"

    def load(self, type_: str = "", size: int = 0, stream: int = 0) -> str:
        """The next vector of one of the streams, its line prefetched `ahead_bytes` earlier if that is not 0."""
        base, offset = (f"%at{stream}" if stream else "%at"), self.offsets.get(stream, 0)
        place = self.let(f"getelementptr i8, ptr {base}, i64 {offset}")
        if self.ahead_bytes and offset % PREFETCHED_BYTES == 0:
            there = self.let(f"getelementptr i8, ptr {base}, i64 {offset + self.ahead_bytes}")
            self.declares.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
            self.lines.append(f"  call void @llvm.prefetch.p0(ptr {there}, i32 0, i32 3, i32 1)")
        self.offsets[stream] = offset + (size or self.isa.vector_bytes)
        return self.let(f"load {type_ or self.ints}, ptr {place}, align 1")

    @property
    def step_bytes(self) -> int:
        """What one iteration reads, of all streams together."""
        return sum(self.offsets.values())

    def stream_starts(self) -> str:
        """Where the streams after the first are in this iteration."""
        lines = []
        for stream in range(1, self.streams):
            lines.append(f"  %from{stream} = mul i64 %part, {stream}")
            lines.append(f"  %i{stream} = add i64 %i, %from{stream}")
            lines.append(f"  %at{stream} = getelementptr i8, ptr %data, i64 %i{stream}")
        return "\n".join(lines)

    def small(self, row: int, type_: str = "") -> str:
        """Vector ``row`` of the small operand, which stays in the first cache level."""
        place = self.let(f"getelementptr i8, ptr %scratch, i64 {row * self.isa.vector_bytes}")
        return self.let(f"load {type_ or self.ints}, ptr {place}, align 1")

    def store(self, row: int, value: str) -> None:
        place = self.let(f"getelementptr i8, ptr %scratch, i64 {SCRATCH_BYTES // 2 + row * self.isa.vector_bytes}")
        self.lines.append(f"  store {self.ints} {value}, ptr {place}, align 1")

    def cast(self, value: str, source: str, target: str) -> str:
        return self.let(f"bitcast {source} {value} to {target}")

    def op(self, name: str, a: str, b: str, type_: str = "") -> str:
        return self.let(f"{name} {type_ or self.ints} {a}, {b}")

    def call(self, result: str, name: str, *arguments: tuple[str, str]) -> str:
        types = ", ".join(type_ for type_, _ in arguments)
        self.declares.add(f"declare {result} @{name}({types})")
        return self.let(f"call {result} @{name}({', '.join(f'{type_} {value}' for type_, value in arguments)})")

    def sum(self, index: int, type_: str = "") -> str:
        """The running value of accumulator ``index``."""
        return self.sums.setdefault(index, (f"%s{index}", type_ or self.ints))[0]

    def set(self, index: int, value: str) -> None:
        self.sums[index] = (value, self.sums[index][1])

    def gather(self, index: int, operation: str, value: str) -> None:
        """Fold an integer vector into accumulator ``index``."""
        self.set(index, self.op(operation, self.sum(index), value))

    def fma(self, index: int, a: str, b: str) -> None:
        kind, name = self.floats, f"llvm.fma.v{self.lanes}f32"
        if "fma" not in self.isa.requires and self.isa.dot != "sdot":
            name = f"llvm.fmuladd.v{self.lanes}f32"
        self.set(index, self.call(kind, name, (kind, a), (kind, b), (kind, self.sum(index, kind))))

    def dot(self, index: int, codes: str, other: str) -> None:
        """Sums of four byte products, both operands given as 32-bit lanes, into accumulator ``index``."""
        total, wide, lanes = self.sum(index), self.ints, self.lanes
        if self.isa.dot == "vpdpbusd":
            name = f"llvm.x86.avx512.vpdpbusd.{8 * self.isa.vector_bytes}"
            self.set(index, self.call(wide, name, (wide, total), (wide, codes), (wide, other)))
            return
        a, b = self.cast(codes, wide, self.codes), self.cast(other, wide, self.codes)
        if self.isa.dot == "sdot":
            arguments = ((wide, total), (self.codes, a), (self.codes, b))
            self.set(index, self.call(wide, "llvm.aarch64.neon.sdot.v4i32.v16i8", *arguments))
        elif self.isa.dot == "maddubs":
            pairs = f"<{2 * lanes} x i16>"
            halves = self.call(pairs, "llvm.x86.avx2.pmadd.ub.sw", (self.codes, a), (self.codes, b))
            ones = self.splat(pairs, 1)
            self.gather(index, "add", self.call(wide, "llvm.x86.avx2.pmadd.wd", (pairs, halves), (pairs, ones)))
        else:
            for quarter in range(4):
                lane = ", ".join(f"i32 {quarter * lanes + i}" for i in range(lanes))
                pick = f"{self.codes} undef, <{lanes} x i32> <{lane}>"
                narrow = [self.let(f"shufflevector {self.codes} {each}, {pick}") for each in (a, b)]
                x, y = (self.let(f"sext <{lanes} x i8> {each} to {wide}") for each in narrow)
                self.gather(index, "add", self.op("mul", x, y))

    def nibbles(self, word: str) -> tuple[str, str]:
        """Low and high nibbles of each byte, as 32-bit lanes."""
        mask = self.splat(self.ints, 0x0F0F0F0F)
        high = self.op("lshr", word, self.splat(self.ints, 4))
        return self.op("and", word, mask), self.op("and", high, mask)

    def shuffle(self, type_: str, a: str, b: str, lanes: list[int]) -> str:
        order = ", ".join(f"i32 {lane}" for lane in lanes)
        return self.let(f"shufflevector {type_} {a}, {type_} {b}, <{len(lanes)} x i32> <{order}>")


def _stream(b: Body) -> None:
    for i in range(8):
        b.gather(i, "or", b.load(stream=i % b.streams))


def _short(b: Body) -> None:
    b.gather(0, "or", b.load())


def _masks(b: Body) -> None:
    value = b.load()
    for i, operation in enumerate(("or", "xor", "and", "xor", "or", "xor", "and", "xor")):
        b.gather(i, operation, value)
        value = b.sum(i)


def _shifts(b: Body) -> None:
    for _ in range(2):
        word = b.load()
        for i in range(6):
            b.gather(i, "xor", b.op("lshr" if i % 2 else "shl", word, b.splat(b.ints, i + 1)))


def _nibbles(b: Body) -> None:
    for i in range(4):
        low, high = b.nibbles(b.load())
        b.gather(2 * i, "xor", low)
        b.gather(2 * i + 1, "xor", high)


def _widen(b: Body) -> None:
    for i in range(8):
        narrow = b.load(f"<{b.lanes} x i8>", b.lanes)
        b.gather(i % 4, "add", b.let(f"{'sext' if i % 2 else 'zext'} <{b.lanes} x i8> {narrow} to {b.ints}"))


def _to_float(b: Body) -> None:
    for i in range(4):
        narrow = b.load(f"<{b.lanes} x i8>", b.lanes)
        wide = b.let(f"sext <{b.lanes} x i8> {narrow} to {b.ints}")
        b.fma(i, b.let(f"sitofp {b.ints} {wide} to {b.floats}"), b.small(i, b.floats))


def _half(b: Body) -> None:
    for i in range(4):
        narrow = b.load(f"<{b.lanes} x half>", 2 * b.lanes)
        b.fma(i, b.let(f"fpext <{b.lanes} x half> {narrow} to {b.floats}"), b.small(i, b.floats))


def _fma(b: Body) -> None:
    vector = b.load(b.floats)
    for row in range(10):
        b.fma(row, vector, b.small(row, b.floats))


def _broadcast(b: Body) -> None:
    for i in range(4):
        place = b.let(f"getelementptr i8, ptr %scratch, i64 {4 * i}")
        scalar = b.let(f"load float, ptr {place}, align 4")
        lane = b.let(f"insertelement {b.floats} undef, float {scalar}, i32 0")
        b.fma(i, b.load(b.floats), b.shuffle(b.floats, lane, "undef", [0] * b.lanes))


def _permute(b: Body) -> None:
    swapped = [i ^ 3 for i in range(4 * b.lanes)]
    turned = [b.lanes - 1 - i for i in range(b.lanes)]
    zipped = [4 * (i // 4) + (i % 4) // 2 + (i % 2) * b.lanes for i in range(b.lanes)]
    for _ in range(2):
        first, second = b.load(), b.load()
        order = b.shuffle(b.codes, b.cast(first, b.ints, b.codes), "undef", swapped)
        b.gather(0, "xor", b.cast(order, b.codes, b.ints))
        b.gather(1, "xor", b.shuffle(b.ints, second, "undef", turned))
        b.gather(2, "xor", b.shuffle(b.ints, first, second, zipped))
        b.gather(3, "xor", b.shuffle(b.ints, second, first, zipped))


def _dot(b: Body) -> None:
    for i in range(4):
        b.dot(i, b.load(), b.small(i))


def _dot_rows(b: Body) -> None:
    codes = b.load()
    for row in range(8):
        b.dot(row, codes, b.small(row))


def _nibble_dot(b: Body) -> None:
    for half in range(2):
        low, high = b.nibbles(b.load())
        for row in range(2):
            b.dot(2 * row, low, b.small(4 * half + 2 * row))
            b.dot(2 * row + 1, high, b.small(4 * half + 2 * row + 1))


def _permute_dot(b: Body) -> None:
    zipped = [8 * (i // 8) + (i % 8) // 2 + (i % 2) * 4 for i in range(4 * b.lanes)]
    for i in range(2):
        low, high = b.nibbles(b.load())
        for j, each in enumerate((low, high)):
            order = b.shuffle(b.codes, b.cast(each, b.ints, b.codes), "undef", zipped)
            b.dot(2 * i + j, b.cast(order, b.codes, b.ints), b.small(2 * i + j))


def _nibble_float(b: Body) -> None:
    for half in range(2):
        for i, each in enumerate(b.nibbles(b.load())):
            part = b.shuffle(b.codes, b.cast(each, b.ints, b.codes), "undef", list(range(b.lanes)))
            wide = b.let(f"sext <{b.lanes} x i8> {part} to {b.ints}")
            b.fma(2 * half + i, b.let(f"sitofp {b.ints} {wide} to {b.floats}"), b.small(i, b.floats))


def _store(b: Body) -> None:
    for i in range(4):
        b.store(i, b.op("add", b.load(), b.small(i)))


def _exponential(b: Body) -> None:
    """What a softmax does to a score: subtract, exp by a degree-5 polynomial, sum, round to an integer code."""
    kind, lanes = b.floats, b.lanes

    def unary(name: str, value: str) -> str:
        return b.call(kind, f"llvm.{name}.v{lanes}f32", (kind, value))

    def muladd(x: str, y: str, z: str) -> str:
        return b.call(kind, f"llvm.fmuladd.v{lanes}f32", (kind, x), (kind, y), (kind, z))

    for i in range(2):
        shifted = b.op("fsub", b.load(kind), b.small(0, kind), kind)
        bounded = b.call(kind, f"llvm.maxnum.v{lanes}f32", (kind, shifted), (kind, b.splat(kind, -60.0)))
        scaled = b.op("fmul", bounded, b.splat(kind, 1.5), kind)
        whole = unary("rint" if lanes > 4 or b.isa.dot == "sdot" else "floor", scaled)
        rest = b.op("fsub", scaled, whole, kind)
        value = b.splat(kind, 0.125)
        for power in range(5):
            value = muladd(value, rest, b.splat(kind, 2.0 ** -(power + 1)))
        exponent = b.op("shl", b.let(f"fptosi {kind} {whole} to {b.ints}"), b.splat(b.ints, 23))
        power_of_two = b.op("add", b.cast(value, kind, b.ints), exponent)
        result = b.cast(power_of_two, b.ints, kind)
        b.set(2 * i, b.op("fadd", b.sum(2 * i, kind), result, kind))
        code = b.let(f"fptosi {kind} {b.op('fmul', result, b.splat(kind, 128.0), kind)} to {b.ints}")
        b.gather(2 * i + 1, "add", code)
    b.exponentials = 2 * lanes


LOOPS: dict[str, tuple[Callable[[Body], None], int]] = {
    "stream": (_stream, 1),
    "short": (_short, 1),
    "masks": (_masks, 1),
    "shifts": (_shifts, 1),
    "nibbles": (_nibbles, 2),
    "widen": (_widen, 1),
    "to_float": (_to_float, 1),
    "half": (_half, 1),
    "fma": (_fma, 1),
    "broadcast": (_broadcast, 1),
    "permute": (_permute, 1),
    "dot": (_dot, 1),
    "dot_rows": (_dot_rows, 1),
    "nibble_dot": (_nibble_dot, 2),
    "permute_dot": (_permute_dot, 2),
    "nibble_float": (_nibble_float, 2),
    "store": (_store, 1),
    "exponential": (_exponential, 1),
}
"""Each loop's body and how many values a byte of its stream holds."""

STREAMED = ("stream", "dot", "dot_rows", "nibble_dot", "permute_dot", "nibble_float", "to_float", "half")
"""Loops that are also measured on data beyond the first cache level."""

READERS = {"stream": (1, 0), "stream_1_2048": (1, 2048), "stream_4_0": (4, 0), "stream_4_1024": (4, 1024)}
"""Ways to read as fast as possible: how many streams each task follows in turn, and how many bytes ahead it prefetches.
Which is fastest depends on the prefetchers of the machine, on the level and on how many cores read."""


def write_loops(isa: Isa) -> tuple[str, dict[str, Body]]:
    """LLVM IR of every loop of `LOOPS` and `READERS` that ``isa`` can express, and the bodies by name."""
    bodies = {}
    functions = []
    declares: set[str] = set()
    wanted = {name: (*written, 1, 0) for name, written in LOOPS.items()}
    wanted |= {name: (*LOOPS["stream"], *how) for name, how in READERS.items()}
    for name, (build, values_per_byte, streams, ahead_bytes) in wanted.items():
        if name == "half" and not isa.half_conversion:
            continue
        body = Body(isa, streams=streams, ahead_bytes=ahead_bytes)
        build(body)
        body.values = values_per_byte * body.step_bytes
        phis, flush = [], []
        for index, (last, type_) in body.sums.items():
            phis.append(f"  %s{index} = phi {type_} [ zeroinitializer, %pass ], [ {last}, %loop ]")
            flush.append(f"  store volatile {type_} {last}, ptr %out, align 1")
        functions.append(
            _FUNCTION.format(
                name=name,
                scratch=SCRATCH_BYTES,
                phis="\n".join(phis),
                body="\n".join(body.lines),
                step=body.step_bytes // streams,
                streams=streams,
                starts=body.stream_starts(),
                flush="\n".join(flush),
            )
        )
        bodies[name] = body
        declares |= body.declares
    functions.append("define void @nothing(ptr %args, i64 %index) {\n  ret void\n}\n")
    return "\n".join([*sorted(declares), *functions]), bodies
