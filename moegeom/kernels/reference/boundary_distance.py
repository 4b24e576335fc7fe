"""Distance to the boundary of an affine cell."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.geometry.boundary import linear as boundary


def boundary_distance(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    margin: Float64[np.ndarray, "tokens"],
    rows: boundary.RowDistances,
    wants_pair: bool = True,
) -> tuple[Float64[np.ndarray, "tokens"], Int32[np.ndarray, "tokens 2"] | None]:
    """Distance and, if wanted, nearest boundary; see :mod:`moegeom.geometry.boundary.linear`.

    ``margin`` is that of ``chosen``; faster kernels prune with it.
    """
    found = boundary.boundary_distance(logits, chosen, rows)
    return found.distance, found.pair if wants_pair else None
