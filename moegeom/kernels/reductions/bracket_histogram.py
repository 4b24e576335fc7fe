"""How wide the bracket of each boundary distance is: upper over lower bound less 1, in bins.

The first bin holds the exact ones alone.
"""

from __future__ import annotations

import numpy as np

from moegeom.geometry.arithmetic.float_bits import LOWEST_EXPONENT
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._counters import histogram_of


def _widths(batch: TokenBatch) -> np.ndarray:
    lower, upper = batch.distance, batch.distance_upper
    assert lower is not None and upper is not None
    width = np.where(lower == upper, 0.0, np.inf)  # inf also where the lower bound is 0
    open_ = (lower != upper) & (lower > 0.0)
    with np.errstate(over="ignore"):
        ratio = upper[open_] / lower[open_]
    width[open_] = np.maximum(ratio - 1.0, 2.0**LOWEST_EXPONENT)
    return width


REDUCTION = histogram_of(
    "bracket_histogram", ("distance", "distance_upper"), _widths, use=Use(on_prior=True)
)
