"""Boundary distances over the length of the router input, in bins cut at powers of two."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._counters import histogram_of


def _relative(batch: TokenBatch) -> np.ndarray:
    assert batch.distance is not None and batch.input_norm is not None
    # an input of zeros is as far from a boundary as it likes, in units of its length
    length = np.where(batch.input_norm > 0.0, batch.input_norm, 1.0)
    relative = batch.distance / length
    return np.where((batch.input_norm > 0.0) | (batch.distance == 0.0), relative, np.inf)


REDUCTION = histogram_of(
    "relative_distance_histogram", ("distance", "input_norm"), _relative, use=Use(on_prior=True)
)
