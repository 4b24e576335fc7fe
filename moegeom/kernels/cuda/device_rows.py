"""Distances between router rows, as the kernels want them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64

from moegeom.geometry.boundary.linear import NO_BOUNDARY, RowDistances

#: Inverse row distances for which float32 quotients of gaps keep their digits; see boundaries.cuh.
_LEAST, _LARGEST = 1e-6, 1e30


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """The inverse distances, and roundings of them that are looked at first.

    ``rounded`` and ``smallest`` are inf for what is no boundary. Where ``fits_float32`` is false
    some distance is so small or large that float64 is used throughout.
    """

    inverse: Float64[np.ndarray, "experts experts"]
    rounded: Float32[np.ndarray, "experts experts"]
    smallest: Float32[np.ndarray, "experts"]
    fits_float32: bool


def device_rows(rows: RowDistances) -> DeviceRows:
    """The tables of a router; 0 (a permanent tie) is kept as it is."""
    boundaries = rows.inverse[(rows.inverse < NO_BOUNDARY) & (rows.inverse != 0.0)]
    with np.errstate(over="ignore"):  # NO_BOUNDARY becomes inf, which is meant
        rounded, smallest = rows.inverse.astype(np.float32), rows.smallest.astype(np.float32)
    fits = bool(((boundaries >= _LEAST) & (boundaries <= _LARGEST)).all())
    return DeviceRows(np.ascontiguousarray(rows.inverse), rounded, smallest, fits)
