"""Sums of the log-sum-exp of the logits and of its square.

Squares of trained routers reach from 1e-2 to 1e5 and must add up exactly in any order, so each is
split into a whole multiple of 2^20 and a rest. Tokens beyond what is added up so are counted: with
any of them the sums are not known.
"""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.reductions._counters import counters

#: Last axis of the counters: tokens, multiples of 2^20, rests and log-sum-exps (units of 2^-18),
#: tokens that are beyond LARGEST.
TOKENS, LARGE, REST, PLAIN, BEYOND = range(5)

LARGE_UNIT = 2.0**20
FIXED_POINT = 2.0**18

#: Beyond it a log-sum-exp is not added up; no router that works comes near it.
LARGEST = 2.0**20


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    assert batch.log_sum_exp is not None
    is_beyond = ~(np.abs(batch.log_sum_exp) <= LARGEST)
    value = np.where(is_beyond, 0.0, batch.log_sum_exp)
    large, rest = np.divmod(value**2, LARGE_UNIT)
    for column, weights in (
        (TOKENS, None),
        (LARGE, large),
        (REST, np.rint(rest * FIXED_POINT)),
        (PLAIN, np.rint(value * FIXED_POINT)),
        (BEYOND, is_beyond.astype(np.float64)),
    ):
        counts[..., column] += batch.count_labels(len(counts), weights)


REDUCTION = counters("log_sum_exp", ("log_sum_exp",), lambda extent: (5,), _fold)
