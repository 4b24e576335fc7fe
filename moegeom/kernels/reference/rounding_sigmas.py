"""Nearest boundary in standard deviations of the rounding of the router input."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.geometry.arithmetic import rounding


def rounding_sigmas(
    values: Float[np.ndarray, "tokens hidden"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    weight: Float[np.ndarray, "experts hidden"],
) -> Float64[np.ndarray, "tokens"]:
    """As :func:`moegeom.geometry.arithmetic.rounding.rounding_sigmas`."""
    return rounding.rounding_sigmas(values, logits, chosen, weight)
