"""Group quantisation: accuracy, short groups, zeros, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit.kernels.errors import QuantizationError
from lowbit.kernels.problem import PRECISIONS
from lowbit.kernels.quantize import DITHER, quantize

LARGEST = {"w8a8": 127, "w4a8": 7}


def values(seed, heads=2, tokens=3, head_dim=80, spread=1.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((heads, tokens, head_dim)) * np.exp(rng.normal(0, spread, (heads, tokens, 1)))).astype(
        np.float32
    )


@given(st.sampled_from(["w8a8", "w4a8"]), st.integers(0, 10**6), st.integers(1, 100), st.floats(0, 3))
def test_each_value_is_within_half_a_step(precision, seed, head_dim, spread):
    x = values(seed, head_dim=head_dim, spread=spread)
    quantized = quantize(x, PRECISIONS[precision])
    largest = LARGEST[precision]
    assert quantized.codes.dtype == np.int8
    assert quantized.codes.shape == x.shape
    assert quantized.scales.shape == (*x.shape[:2], -(-head_dim // 32))
    assert np.abs(quantized.codes).max() <= largest
    for group in range(quantized.scales.shape[2]):
        part = x[:, :, 32 * group : 32 * group + 32].astype(np.float64)
        ideal = np.abs(part).max(axis=2) / largest
        step = quantized.scales[:, :, group].astype(np.float64)
        np.testing.assert_allclose(step, ideal, rtol=2**-11, atol=2**-25)
        # The largest value may be clipped by as much as rounding the scale to fp16 took away.
        allowed = step / 2 + largest * np.maximum(ideal - step, 0) + 1e-6 * step
        difference = np.abs(quantized.dequantize()[:, :, 32 * group : 32 * group + 32] - part)
        assert (difference <= allowed[..., None]).all()


def test_known_codes():
    x = np.zeros((1, 1, 33), np.float32)
    x[0, 0, :4] = [14, -14, 5, -0.9]
    x[0, 0, 32] = -3.5
    quantized = quantize(x, PRECISIONS["w4a8"])
    assert quantized.codes[0, 0, :4].tolist() == [7, -7, 2, 0]
    assert quantized.codes[0, 0, 32] == -7
    assert quantized.scales[0, 0].tolist() == [2.0, 0.5]
    np.testing.assert_array_equal(quantized.dequantize()[0, 0, [0, 1, 2, 3, 32]], [14, -14, 4, 0, -3.5])


@pytest.mark.parametrize("precision", ["w8a8", "w4a8"])
def test_zero_groups_and_groups_that_underflow_are_zeros(precision):
    x = values(1)
    x[0, 1, :32] = 0
    x[1, 2, 64:] = 1e-9
    quantized = quantize(x, PRECISIONS[precision])
    assert not quantized.codes[0, 1, :32].any()
    assert quantized.scales[0, 1, 0] == 0
    assert not quantized.dequantize()[1, 2, 64:].any()
    assert quantized.codes[0, 1, 32:].any()
    assert np.isfinite(quantized.dequantize()).all()


def test_a_short_last_group_has_a_scale_of_its_own():
    x = values(2)
    x[:, :, 64:] *= 100
    quantized = quantize(x, PRECISIONS["w8a8"])
    np.testing.assert_array_equal(np.abs(quantized.codes[:, :, 64:]).max(axis=2), 127)
    np.testing.assert_array_equal(np.abs(quantized.codes[:, :, :32]).max(axis=2), 127)


def test_halves_are_rounded_to_nearest():
    x = values(3)
    quantized = quantize(x, PRECISIONS["fp16"])
    assert quantized.codes.dtype == np.float16
    assert quantized.scales.shape == (2, 3, 0)
    np.testing.assert_allclose(quantized.dequantize(), x, rtol=2**-11)


@pytest.mark.parametrize("precision", ["fp16", "w8a8", "w4a8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_name_and_position(precision, bad):
    x = values(4)
    x[1, 2, 70] = bad
    x[1, 2, 75] = bad
    with pytest.raises(QuantizationError, match=r"^keys\[head 1, token 2, channel 70\] = .* is not finite$"):
        quantize(x, PRECISIONS[precision], "keys")


@pytest.mark.parametrize(("precision", "magnitude"), [("fp16", 7e4), ("w8a8", 127 * 7e4), ("w4a8", 7 * 7e4)])
def test_overflow_of_fp16_is_refused_where_it_happens(precision, magnitude):
    x = values(5)
    x[0, 1, 40] = -magnitude
    with pytest.raises(QuantizationError, match=r"operand\[head 0, token 1, channel .* exceeds fp16$"):
        quantize(x, PRECISIONS[precision])
    x[0, 1, 40] = magnitude * 0.9
    assert np.isfinite(quantize(x, PRECISIONS[precision]).dequantize()).all()


def test_the_offending_channel_is_named_and_not_its_group():
    x = values(6)
    x[0, 1, 45] = 1e9
    with pytest.raises(QuantizationError, match=r"channel 45\] = 1000000000.0 "):
        quantize(x, PRECISIONS["w8a8"])


@pytest.mark.parametrize("shape", [(4,), (3, 4), (1, 2, 3, 4)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(QuantizationError, match=r"must have shape \(heads, tokens, head_dim\)"):
        quantize(np.zeros(shape, np.float32), PRECISIONS["w8a8"])


def test_dither_spreads_thresholds_evenly():
    """Any run of 8 aligned thresholds has one in each eighth, so that a constant weight keeps its mean."""
    assert sorted(DITHER) == [(i + 0.5) / 32 for i in range(32)]
    for start in range(0, 32, 8):
        assert sorted(int(8 * t) for t in DITHER[start : start + 8]) == list(range(8))
