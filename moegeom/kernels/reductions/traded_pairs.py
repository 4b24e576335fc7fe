"""Pairs of experts that trade tokens when a variant chooses."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._pairs import pair_counts


def _trades(batch: TokenBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    assert batch.switch is not None
    row, out, into = batch.switch.trades.T
    return row, out, into


REDUCTION = pair_counts("traded_pairs", ("switch",), _trades, use=Use(of_switch=True))
