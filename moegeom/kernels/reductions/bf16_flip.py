"""Expected number of tokens that rounding the router input to bfloat16 flips."""

from __future__ import annotations

import numpy as np

from moegeom.geometry.arithmetic.rounding import flip_probability
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels, Use
from moegeom.kernels.reductions._counters import counters

#: Probabilities (at most 1/2) are summed as integers of 2^-36: the sum of a batch of 2^14 tokens is
#: below 2^53, so exact in float64, and 2^28 tokens fit into one population and block.
FIXED_POINT = 2.0**36


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    assert batch.distance is not None and batch.noise_scale is not None
    probability = flip_probability(batch.distance, batch.noise_scale)
    counts[..., 0] += batch.count_labels(len(counts))
    counts[..., 1] += batch.count_labels(len(counts), np.rint(probability * FIXED_POINT))


REDUCTION = counters(
    "bf16_flip",
    ("distance", "noise_scale", "input_norm"),
    lambda extent: (2,),
    _fold,
    use=Use(on_prior=True),
)
