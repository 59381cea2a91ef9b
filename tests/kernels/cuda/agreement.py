"""How closely kernels of the integer and float pipelines agree with the float64 reference."""

import numpy as np
from lowbit.kernels.reference import error, reference, tolerance

FLOAT32 = 3e-5
"""What sums in float32 may differ by. The rounding of queries and weights is the reference's own: only where a number
lies on a rounding threshold may more differ, a step of one group of channels."""

LEAST_SHARE = 0.5
"""Of the results that must be that close, which a wrong kernel's are not."""


def agree(problem, operands, pipeline, result, what):
    """Assert that all of ``result`` is within the tolerance and most of it within float32's own error."""
    expected = reference(problem, operands, pipeline)
    found, allowed = error(result, expected), tolerance(problem, operands, pipeline)
    assert found <= allowed, f"{what}: error {found:.2e} exceeds {allowed:.2e}"
    size = np.abs(expected).max(axis=2, keepdims=True)
    share = float((np.abs(result - expected) <= FLOAT32 * size).mean())
    assert share >= LEAST_SHARE, f"{what}: only {share:.0%} of the results are within float32's error"
