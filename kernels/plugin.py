"""Packed operands in Numba: a type whose type is its layout, and tiles as intrinsics.

Passing a `PackedTensor` to an ``@njit`` function specialises that function to the operand's layout: the intrinsics
below read the layout from the argument's type and lower to the tile code of the machine's instruction set. Operators
are therefore written once, over (token, channel) coordinates. Registered with Numba through the ``numba_extensions``
entry point, so that importing `lowbit` first is not needed.

Addresses are plain integers (``intp``) inside kernels; `peek`, `load_f32` and their kin read and write through them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import TypingError
from numba.extending import (
    NativeValue,
    intrinsic,
    make_attribute_wrapper,
    models,
    register_model,
    typeof_impl,
    unbox,
)

from .errors import LayoutError
from .layout import Layout
from .packed import OPERAND, PackedTensor


@dataclass(frozen=True)
class TileShape:
    """How tiles of an operand are computed: the part of a candidate that is neither layout nor threading.

    Parameters
    ----------
    pipeline : str
        ``integer`` or ``float``.
    rows : int
        Rows of the small operand a tile call serves.
    registers : int
        Accumulator registers per row.
    prefetch : int
        Cache lines ahead, 0 for none.
    isa : str
        Name of the instruction set.
    """

    pipeline: str
    rows: int
    registers: int
    prefetch: int
    isa: str


class PackedType(types.Type):
    """Numba type of a packed operand. Two operands have the same type if a kernel for one serves the other."""

    def __init__(self, layout: Layout, head_dim: int, tile: TileShape):
        self.layout, self.head_dim, self.tile = layout, head_dim, tile
        super().__init__(name=f"Packed({layout.name}, {head_dim}, {tile})")

    @property
    def key(self) -> tuple[Layout, int, TileShape]:
        return self.layout, self.head_dim, self.tile


class DispatchedType(types.Type):
    """Numba type of a packed operand whose tile function is called by address: one type for every layout."""

    def __init__(self) -> None:
        super().__init__(name="DispatchedPacked")


OperandType = PackedType | DispatchedType

LAYOUT_NEEDED = "load_element needs the layout of its operand in the type"

_FIELDS = [(name, types.intp) for name in OPERAND]


@register_model(PackedType)
@register_model(DispatchedType)
class _OperandModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: OperandType):
        super().__init__(dmm, fe_type, _FIELDS)


for _name, _ in _FIELDS:
    make_attribute_wrapper(PackedType, _name, _name)
    make_attribute_wrapper(DispatchedType, _name, _name)


@typeof_impl.register(PackedTensor)
def _typeof_packed(value: PackedTensor, context: Any) -> PackedType:
    from .cpu.isa import detect

    pipeline = "float" if value.layout.packing.format == "fp16" else "integer"
    return PackedType(value.layout, value.head_dim, TileShape(pipeline, 1, 2, 0, detect().name))


@unbox(PackedType)
def _unbox_packed(typ: PackedType, obj: Any, c: Any) -> NativeValue:
    """Read the fields from ``PackedTensor.addresses``; the caller keeps the tensor alive for the call."""
    fields = c.pyapi.object_getattr_string(obj, "addresses")
    proxy = cgutils.create_struct_proxy(typ)(c.context, c.builder)
    for position, (name, field_type) in enumerate(_FIELDS[:-1]):
        item = c.pyapi.tuple_getitem(fields, position)
        setattr(proxy, name, c.unbox(field_type, item).value)
    c.pyapi.decref(fields)
    return NativeValue(proxy._getvalue(), is_error=cgutils.is_not_null(c.builder, c.pyapi.err_occurred()))


def register() -> None:
    """Entry point that Numba calls: importing this module is the registration."""


# -- memory -----------------------------------------------------------------------------------------------------------


def _scalar_load(result: types.Type) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], context.get_value_type(result).as_pointer())
            return builder.load(builder.gep(pointer, [args[1]]))

        return result(types.intp, types.intp), codegen

    return load


def _scalar_store(element: types.Type) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], context.get_value_type(element).as_pointer())
            builder.store(args[2], builder.gep(pointer, [args[1]]))
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, element), codegen

    return store


peek, poke = _scalar_load(types.int64), _scalar_store(types.int64)
load_f32, store_f32 = _scalar_load(types.float32), _scalar_store(types.float32)
load_i32, store_i32 = _scalar_load(types.int32), _scalar_store(types.int32)
load_i8, store_i8 = _scalar_load(types.int8), _scalar_store(types.int8)


@intrinsic
def float_from_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


# -- tiles ------------------------------------------------------------------------------------------------------------


def tile_spec(role: str, typ: PackedType) -> Any:
    """The tile function that ``typ`` asks for in this role."""
    from .cpu.isa import isa_named
    from .cpu.spec import TileSpec

    tile = typ.tile
    return TileSpec(
        role, typ.layout, typ.head_dim, isa_named(tile.isa), tile.pipeline, tile.rows, tile.registers, tile.prefetch
    )


def _head(context: Any, builder: Any, typ: OperandType, value: Any, head: Any) -> tuple[Any, Any]:
    """Pointers to a head's words and scales."""
    proxy = cgutils.create_struct_proxy(typ)(context, builder, value=value)
    byte = ir.IntType(8).as_pointer()
    words = builder.add(proxy.words, builder.mul(head, proxy.words_stride))
    scales = builder.add(proxy.scales, builder.mul(head, proxy.scales_stride))
    return builder.inttoptr(words, byte), builder.inttoptr(scales, byte)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


def _tile_function(context: Any, builder: Any, role: str, typ: OperandType, value: Any) -> Any:
    """The tile function of an operand: emitted into the kernel, or the one whose address the operand carries."""
    from .cpu.keys import DOT_TILE, emit_dot_tile
    from .cpu.values import ACCUMULATE_TILE, emit_accumulate_tile

    declared = getattr(typ, "role", role)
    if declared != role:
        raise LayoutError(f"an operand of role {declared!r} cannot be read as one of role {role!r}")
    if isinstance(typ, PackedType):
        emit = emit_dot_tile if role == "k" else emit_accumulate_tile
        return emit(builder.module, tile_spec(role, typ))
    signature = DOT_TILE if role == "k" else ACCUMULATE_TILE
    proxy = cgutils.create_struct_proxy(typ)(context, builder, value=value)
    return builder.inttoptr(proxy.tile, signature.as_pointer())


@intrinsic
def dot_tile(
    typingctx: Any, k: Any, head: Any, first: Any, count: Any, x: Any, aux: Any, scores: Any, stride: Any
) -> Any:
    """scores[row·stride + i] = q[row]·K[head, first + i] for ``count`` tokens; see `lowbit.kernels.cpu.keys`."""
    if not isinstance(k, OperandType):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = _tile_function(context, builder, "k", k, args[0])
        words, scales = _head(context, builder, k, args[0], args[1])
        x_, aux_, scores_ = (_pointer(builder, args[i]) for i in (4, 5, 6))
        builder.call(function, [words, scales, args[2], args[3], x_, aux_, scores_, args[7]])
        return context.get_dummy_value()

    return types.void(k, *[types.intp] * 7), codegen


@intrinsic
def accumulate_tile(
    typingctx: Any,
    v: Any,
    head: Any,
    first: Any,
    count: Any,
    p: Any,
    stride: Any,
    scratch: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """out[row·out_stride + d] += Σ_i p[row·stride + i]·V[head, first + i, d]; see `lowbit.kernels.cpu.values`."""
    if not isinstance(v, OperandType):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = _tile_function(context, builder, "v", v, args[0])
        words, scales = _head(context, builder, v, args[0], args[1])
        p_, scratch_, out_ = (_pointer(builder, args[i]) for i in (4, 6, 7))
        builder.call(function, [words, scales, args[2], args[3], p_, args[5], scratch_, out_, args[8]])
        return context.get_dummy_value()

    return types.void(v, *[types.intp] * 8), codegen


@intrinsic
def call_task(typingctx: Any, function: Any, job: Any, index: Any) -> Any:
    """Call the ``void task(job, index)`` at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        task = ir.FunctionType(ir.VoidType(), [ir.IntType(64), ir.IntType(64)])
        builder.call(builder.inttoptr(args[0], task.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64), codegen


@intrinsic
def softmax_tile(
    typingctx: Any,
    function: Any,
    scores: Any,
    stride: Any,
    rows: Any,
    first: Any,
    last: Any,
    count: Any,
    state: Any,
    out: Any,
    channels: Any,
    cap: Any,
) -> Any:
    """One online-softmax update by the function at an address; see `lowbit.kernels.cpu.softmax`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from .cpu.softmax import SOFTMAX_TILE

        target = builder.inttoptr(args[0], SOFTMAX_TILE.as_pointer())
        scores_, state_, out_ = (_pointer(builder, args[i]) for i in (1, 7, 8))
        builder.call(target, [scores_, *args[2:7], state_, out_, args[9], args[10]])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 10, types.float32), codegen


@intrinsic
def add_minima(
    typingctx: Any,
    function: Any,
    scales: Any,
    minima: Any,
    first: Any,
    count: Any,
    groups: Any,
    sums: Any,
    out: Any,
    stride: Any,
) -> Any:
    """What minima add to a few vectors' products, by the function at an address; see `lowbit.kernels.cpu.minima`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from .cpu.minima import ADD_MINIMA

        target = builder.inttoptr(args[0], ADD_MINIMA.as_pointer())
        scales_, minima_, sums_, out_ = (_pointer(builder, args[i]) for i in (1, 2, 6, 7))
        builder.call(target, [scales_, minima_, *args[3:6], sums_, out_, args[8]])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 9), codegen


@intrinsic
def load_element(typingctx: Any, operand: Any, head: Any, t: Any, d: Any) -> Any:
    """The float32 value of element (head, t, d): any layout, one element at a time."""
    if isinstance(operand, DispatchedType):
        raise TypingError(LAYOUT_NEEDED)
    if not isinstance(operand, PackedType):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from .cpu.element import emit_load_element

        words, scales = _head(context, builder, operand, args[0], args[1])
        return emit_load_element(builder, operand.layout, operand.head_dim, words, scales, args[2], args[3])

    return types.float32(operand, types.intp, types.intp, types.intp), codegen


def operand_reader(typ: OperandType) -> Any:
    """An intrinsic ``read(address)`` that makes an operand of ``typ`` from `OPERAND_FIELDS` int64 fields in memory."""

    @intrinsic
    def read(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            proxy = cgutils.create_struct_proxy(typ)(context, builder)
            base = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
            for position, (name, _) in enumerate(_FIELDS):
                setattr(proxy, name, builder.load(builder.gep(base, [ir.Constant(ir.IntType(64), position)])))
            return proxy._getvalue()

        return typ(types.intp), codegen

    return read
