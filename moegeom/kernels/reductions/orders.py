"""Near-ties at the border of the chosen set, on a ladder of widths; for a sample of tokens."""

from __future__ import annotations

import numpy as np

from moegeom.geometry.boundary.orders import near_tie_ladder
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels, Use
from moegeom.kernels.reductions._counters import counters

#: Widths in units of the selection score.
LADDER = 2.0 ** np.arange(-8.0, 1.0, 2.0)

#: Last axis of the counters: tokens, orders, extra experts, tokens of order 2 or more.
TOKENS, ORDERS, EXTRAS, MULTIPLE = range(4)


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    assert batch.selection is not None
    top_k = batch.chosen.shape[1]
    orders, extras = near_tie_ladder(batch.selection, top_k, LADDER)
    for step in range(len(LADDER)):
        for column, weights in (
            (TOKENS, None),
            (ORDERS, orders[:, step]),
            (EXTRAS, extras[:, step]),
            (MULTIPLE, orders[:, step] > 1),
        ):
            counts[..., step, column] += batch.count_labels(len(counts), weights)


REDUCTION = counters(
    "orders",
    ("selection",),
    lambda extent: (len(LADDER), 4),
    _fold,
    use=Use(on_prior=True, is_sampled=True),
)
