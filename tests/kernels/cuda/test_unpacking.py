"""Dot words against the codes that were packed, and the order of the small operand, by Python's meaning of steps."""

import itertools

import numpy as np
import pytest
from lowbit.kernels.cuda.mapping import Infeasible, key_tilings, value_tilings
from lowbit.kernels.cuda.python_ops import PythonOps
from lowbit.kernels.cuda.space import KEY_ORDERS, VALUE_ORDERS
from lowbit.kernels.cuda.unpacking import order, plan, transpose, unpack
from lowbit.kernels.errors import LayoutError
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack
from lowbit.kernels.packing import packings
from lowbit.kernels.quantize import Quantized

OPS = PythonOps()
HEAD_DIM = 64


def tilings(layout, role):
    try:
        return list(key_tilings(layout, HEAD_DIM, 8) if role == "k" else value_tilings(layout, HEAD_DIM))
    except (Infeasible, LayoutError):
        return []


def cases():
    for format, role in itertools.product(("int8", "int4"), ("k", "v")):
        for packing, text in itertools.product(packings(format), KEY_ORDERS if role == "k" else VALUE_ORDERS):
            layout = Layout.parse(f"{text} | {packing.name}")
            for tiling in tilings(layout, role):
                for pipeline in ("integer", "raw"):
                    try:
                        found = plan(tiling, packing, pipeline)
                    except Infeasible:
                        continue
                    yield layout, tiling, found


CASES = list(cases())


def packed_codes(layout, seed):
    rng = np.random.default_rng(seed)
    most = 127 if layout.packing.bits == 8 else 7
    codes = rng.integers(-most, most + 1, (1, 32, HEAD_DIM)).astype(np.int8)
    scales = np.ones((1, 32, HEAD_DIM // 32), np.float16)
    return codes[0], pack(Quantized(layout.packing.format, codes, scales), layout).words[0]


def test_dot_words_are_four_codes_of_one_output_in_the_order_of_the_small_operand():
    """Every lane and bundle of every feasible tiling: words that a vector yields against the codes themselves."""
    assert len(CASES) > 200
    for layout, tiling, found in CASES:
        codes, words = packed_codes(layout, 1)
        small = order(tiling, found)
        size = found.vectors * len(tiling.vectors.reduced_each)
        for lane in (0, 5, 31):
            o_lane, r_lane = divmod(lane, tiling.lanes_r)
            if o_lane >= tiling.last_o:
                continue
            for i, q in itertools.product(range(tiling.iters_o), range(tiling.iters_r // found.vectors)):
                bundle = []
                for v in range(found.vectors):
                    start = tiling.lane_offsets(i, q * found.vectors + v)[lane]
                    bundle.append(words[start : start + tiling.vectors.width].view(np.int32).tolist())
                first = (q * tiling.lanes_r + r_lane) * size
                outputs = tiling.output(i, o_lane)
                for word, value in zip(found.words, unpack(OPS, found, bundle), strict=True):
                    dtype = np.int8 if found.signed else np.uint8
                    got = np.array([value], np.int32).view(dtype).astype(int)
                    reduced = [small[first + 4 * word.small + b] for b in range(4)]
                    o = outputs[word.output]
                    expected = [codes[o, r] if tiling.role == "k" else codes[r, o] for r in reduced]
                    weight = 16 if word.high else 1
                    assert got.tolist() == [weight * (int(c) + found.offset) for c in expected], (layout.name, word)


def test_the_small_operand_is_read_once_by_every_lane():
    for layout, tiling, found in CASES:
        slots = order(tiling, found)
        length = HEAD_DIM if tiling.role == "k" else 32
        assert sorted(slots) == list(range(length)), layout.name


def test_transposing_four_words():
    rows = np.arange(16, dtype=np.uint8).reshape(4, 4)
    words = rows.copy().view(np.int32).ravel().tolist()
    columns = np.array(transpose(OPS, words), np.int32).view(np.uint8).reshape(4, 4)
    assert (columns == rows.T).all()


def operations(packing, pipeline="integer"):
    """Instructions that unpack one word of eight codes of one output."""

    class Counting(PythonOps):
        count = 0

        def lop3(self, *given):
            self.count += 1
            return super().lop3(*given)

        def prmt(self, *given):
            self.count += 1
            return super().prmt(*given)

        def shift_right(self, *given):
            self.count += 1
            return super().shift_right(*given)

    layout = Layout.parse(f"T D | {packing}")
    tiling = next(each for each in key_tilings(layout, HEAD_DIM, 1) if each.vectors.width == 4)
    ops = Counting()
    unpack(ops, plan(tiling, layout.packing, pipeline), [[0x12345678]])
    return ops.count


def test_putting_nibbles_back_in_order_is_what_contiguous_costs():
    assert operations("int4/contiguous/offset") == 5
    assert operations("int4/contiguous_permuted/offset") == 2
    assert operations("int4/lane_interleaved/offset") == 2
    assert operations("int4/lane_interleaved/signed") == 2


def test_the_raw_pipeline_is_for_offset_nibbles_left_in_their_order():
    layout = Layout.parse("T D | int4/lane_interleaved/signed")
    tiling = next(key_tilings(layout, HEAD_DIM, 1))
    for name in ("int4/lane_interleaved/signed", "int4/contiguous/offset"):
        with pytest.raises(Infeasible, match="raw pipeline"):
            plan(tiling, Layout.parse(f"T D | {name}").packing, "raw")
