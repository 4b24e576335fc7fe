"""Which boundary is nearest: tokens by (expert out, expert in), population and block."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._pairs import pair_counts


def _nearest(batch: TokenBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    assert batch.pair is not None
    row = np.flatnonzero(batch.pair[:, 0] >= 0)
    return row, batch.pair[row, 0], batch.pair[row, 1]


REDUCTION = pair_counts(
    "boundary_pairs", ("distance", "pair"), _nearest, use=Use(on_prior=True, of_random_router=False)
)
