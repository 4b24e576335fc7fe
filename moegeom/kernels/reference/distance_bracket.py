"""Bounds of the distance to the boundary from the largest logits."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.geometry.boundary import top_logits
from moegeom.geometry.boundary.linear import RowDistances


def distance_bracket(
    logits: Float[np.ndarray, "tokens m"],
    expert: Int32[np.ndarray, "tokens m"],
    chosen: Int32[np.ndarray, "tokens k"],
    margin: Float64[np.ndarray, "tokens"],
    rows: RowDistances,
) -> tuple[
    Float64[np.ndarray, "tokens"], Float64[np.ndarray, "tokens"], Int32[np.ndarray, "tokens 2"]
]:
    """Least and largest distance, nearest boundary; see
    :mod:`moegeom.geometry.boundary.top_logits`.

    ``chosen`` are the largest of ``logits`` and ``margin`` is theirs, so that m > k or m = E;
    faster kernels prune with it.
    """
    found = top_logits.distance_bracket(logits, expert, chosen, rows)
    return found.lower, found.upper, found.pair
