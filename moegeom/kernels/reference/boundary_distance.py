"""Distance to the boundary of an affine cell."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.geometry import boundary


def boundary_distance(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rows: boundary.RowDistances,
) -> tuple[Float64[np.ndarray, "tokens"], Int32[np.ndarray, "tokens 2"]]:
    """Distance and nearest wall; see :func:`moegeom.geometry.boundary.boundary_distance`."""
    found = boundary.boundary_distance(logits, chosen, rows)
    return found.distance, found.pair
