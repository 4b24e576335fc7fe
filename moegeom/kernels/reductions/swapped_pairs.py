"""Pairs of experts that trade tokens when a variant chooses."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._pairs import pair_counts


def _swaps(batch: TokenBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    assert batch.flip is not None
    row, out, into = batch.flip.swaps.T
    return row, out, into


REDUCTION = pair_counts("swapped_pairs", ("flip",), _swaps, use=Use(of_flip=True))
