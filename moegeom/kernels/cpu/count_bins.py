"""Histograms over the bits of a value."""

from __future__ import annotations

import numpy as np
from numba import njit

from moegeom.geometry.arithmetic.float_bits import FIRST_CODE, NUM_BINS


@njit(nogil=True, cache=True)
def _count(histogram, bits, population, block):
    for token in range(bits.shape[0]):
        index = (bits[token] >> 48) - FIRST_CODE + 1
        index = min(max(index, 0), NUM_BINS - 1)
        histogram[population[token], block[token], index] += 1


def count_bins(
    histogram: np.ndarray, values: np.ndarray, population: np.ndarray, block: np.ndarray
) -> None:
    """Adds 1 at (population, block, bin of the value)."""
    # adding 0.0 turns -0.0, whose bits are odd, into 0.0
    _count(histogram, (values + 0.0).view(np.int64), population, block)
