"""Tokens at which the fill of the group mask decides the chosen set."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reductions._sums import sums


def _numbers(batch: TokenBatch) -> np.ndarray:
    assert batch.fill_decides is not None
    return batch.fill_decides.astype(np.float64)[:, None]


REDUCTION = sums("mask_fill", ("fill_decides",), 1, _numbers)
