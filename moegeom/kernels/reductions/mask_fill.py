"""Tokens at which the fill of the group mask decides the chosen set."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reductions._sums import sums


def _numbers(quantities: Quantities) -> np.ndarray:
    assert quantities.fill_decides is not None
    return quantities.fill_decides.astype(np.float64)[:, None]


REDUCTION = sums("mask_fill", ("fill_decides",), 1, _numbers)
