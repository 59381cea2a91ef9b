"""Which lane reads what, against the layout's own address map."""

import itertools

import numpy as np
import pytest
from lowbit.kernels.cuda.mapping import LANES, TILE, Infeasible, key_tilings, lane_part, value_tilings
from lowbit.kernels.cuda.space import KEY_ORDERS, VALUE_ORDERS
from lowbit.kernels.errors import LayoutError
from lowbit.kernels.layout import Layout
from lowbit.kernels.packing import packings

PACKINGS = [packing for format in ("fp16", "int8", "int4") for packing in packings(format) if not packing.offset]
"""Codings differ in values only."""


def tilings():
    for order, packing, head_dim in itertools.product(KEY_ORDERS, PACKINGS, (64, 80, 128)):
        for lanes in (1, 2, 4, 8):
            yield "k", Layout.parse(f"{order} | {packing.name}"), head_dim, lanes
    for order, packing, head_dim in itertools.product(VALUE_ORDERS, PACKINGS, (64, 80, 128)):
        yield "v", Layout.parse(f"{order} | {packing.name}"), head_dim, 0


def found(role, layout, head_dim, lanes):
    try:
        return list(key_tilings(layout, head_dim, lanes) if role == "k" else value_tilings(layout, head_dim))
    except (Infeasible, LayoutError):
        return []


def codes_of(tiling, layout):
    """Bit, token and channel of every code that a lane reads, one entry for each time that it is read."""
    vectors, found = tiling.vectors, []
    code_o, code_r = np.array(vectors.code_o), np.array(vectors.code_r)
    lane = np.arange(LANES)
    o_lane, r_lane = np.divmod(lane, tiling.lanes_r)
    for i, j in itertools.product(range(tiling.iters_o), range(tiling.iters_r)):
        own = o_lane < (tiling.last_o if i == tiling.iters_o - 1 else tiling.lanes_o)
        start = np.array(tiling.lane_offsets(i, j))[own]
        o = vectors.outputs[(i * tiling.lanes_o + o_lane)[own]][:, None] + code_o
        r = vectors.reduced[(j * tiling.lanes_r + r_lane)[own]][:, None] + code_r
        place = 8 * start[:, None] + layout.packing.bits * np.arange(len(code_o))
        token, channel = (o, r) if tiling.role == "k" else (r, o)
        found.append(np.stack([place, token, channel]).reshape(3, -1))
    return np.concatenate(found, axis=1)


def test_lanes_read_every_code_once_and_know_which_it_is():
    """Exhaustive over a tile, for every offered order and placement; the address map is the layout's."""
    count = 0
    for role, layout, head_dim, lanes in tilings():
        for tiling in found(role, layout, head_dim, lanes):
            unit = layout.unit("D")
            t, d = np.indices((TILE, -(-head_dim // unit) * unit))
            byte, shift = layout.address(t, d, TILE, head_dim)
            expected = np.stack([8 * byte + shift, t, d]).reshape(3, -1)
            read = codes_of(tiling, layout)
            same = read.shape == expected.shape and (
                read[:, np.argsort(read[0])] == expected[:, np.argsort(expected[0])]
            )
            assert np.all(same), (role, layout.name, head_dim, tiling)
            count += 1
    assert count > 300


@pytest.mark.parametrize("tile", [0, 1, 5])
@pytest.mark.parametrize("order", KEY_ORDERS)
def test_later_tiles_lie_where_the_first_one_does(order, tile):
    layout = Layout.parse(f"{order} | int8/bytes/signed | pad 16")
    lanes = 4 if order == "T/32 D t32" else 1
    tiling = next(key_tilings(layout, 64, lanes))
    t, d = np.arange(TILE)[:, None], np.arange(64)[None, :]
    first, later = (layout.address(t + TILE * n, d, TILE * 8, 64)[0] for n in (0, tile))
    assert (later - first == tile * tiling.tile_bytes).all()


def test_loads_are_as_wide_as_the_run_of_a_token_allows():
    def width(order, packing, lanes=1):
        return next(key_tilings(Layout.parse(f"{order} | {packing}"), 128, lanes)).vectors.width

    assert width("T D", "int8/bytes/signed") == 16
    assert width("T/32 D/4 t32 d4", "int8/bytes/signed") == 4
    assert width("T/32 D/16 t32 d16", "int4/contiguous/offset") == 8
    assert width("T/32 D/4 t32 d4", "int8/bytes/signed", lanes=4) == 16


def test_layouts_that_lanes_cannot_share_say_why():
    with pytest.raises(Infeasible, match="8 tokens share a vector, 1 lanes"):
        list(key_tilings(Layout.parse("T/32 D t32 | int4/contiguous/offset"), 128, 1))
    with pytest.raises(Infeasible, match="no run of storage rows"):
        list(key_tilings(Layout.parse("D T | int8/bytes/signed"), 128, 1))
    with pytest.raises(Infeasible, match="not folded"):
        list(key_tilings(Layout.parse("T D | int8/bytes/signed | fold 64"), 128, 1))
    with pytest.raises(Infeasible, match="do not divide among 8 lanes"):
        list(key_tilings(Layout.parse("T/32 D/4 t32 d4 | int8/bytes/signed"), 80, 8))


@pytest.mark.parametrize(("factor", "shift"), [(0, 0), (1, 0), (16, 0), (16, 5), (4, 5)])
def test_lane_part_states_regular_differences_as_arithmetic(factor, shift):
    values = [7 + (lane * factor >> shift) for lane in range(LANES)]
    found_factor, found_shift = lane_part(values, "it")
    assert [7 + (lane * found_factor >> found_shift) for lane in range(LANES)] == values


def test_lane_part_refuses_what_is_irregular():
    with pytest.raises(Infeasible, match="no regular way"):
        lane_part([0, 1, 3, 4], "it")
