"""Chosen experts and margin."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.geometry.selection import pick


def top_k(
    selection: Float[np.ndarray, "tokens experts"], k: int
) -> tuple[Int32[np.ndarray, "tokens k"], Float64[np.ndarray, "tokens"]]:
    """The k largest in descending order, ties to the lowest index, and the margin."""
    return pick.top_k(selection, k), pick.margin(selection, k)
