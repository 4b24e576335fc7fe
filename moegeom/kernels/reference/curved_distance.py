"""Distance to the boundary of a cell with curved or grouped walls, or bounds of it."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.geometry.boundary.curved import curved_boundary
from moegeom.geometry.boundary.curved_rows import CurvedRows
from moegeom.geometry.boundary.grouped import grouped_boundary


def curved_distance(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rows: CurvedRows,
) -> tuple[
    Float64[np.ndarray, "tokens"], Float64[np.ndarray, "tokens"], Int32[np.ndarray, "tokens 2"]
]:
    """Lower and upper bound of the distance, and the nearest wall, -1 where it is not known.

    ``chosen`` is what the rule of ``rows`` makes of ``logits``. See
    :mod:`moegeom.geometry.boundary.curved` and :mod:`moegeom.geometry.boundary.grouped`.
    """
    boundary = curved_boundary if rows.is_separable else grouped_boundary
    found = boundary(logits, chosen, rows)
    return found.lower, found.upper, found.pair
