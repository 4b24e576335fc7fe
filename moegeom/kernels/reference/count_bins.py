"""Histograms over the bits of a value."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int32, Int64

from moegeom.geometry.arithmetic.float_bits import bin_index


def count_bins(
    histogram: Int64[np.ndarray, "populations blocks bins"],
    values: Float64[np.ndarray, "tokens"],
    population: Int32[np.ndarray, "tokens"],
    block: Int32[np.ndarray, "tokens"],
) -> None:
    """Adds 1 at (population, block, bin of the value) (geometry.arithmetic.float_bits)."""
    np.add.at(histogram, (population, block, bin_index(values)), 1)
