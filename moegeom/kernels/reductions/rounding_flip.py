"""Expected flips under rounding of each coordinate of the input; for a sample."""

from __future__ import annotations

import numpy as np

from moegeom.geometry.arithmetic.rounding import flip_probability
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._sums import sums


def _numbers(batch: TokenBatch) -> np.ndarray:
    sigmas = batch.rounding_sigmas
    assert sigmas is not None
    return flip_probability(sigmas, np.ones_like(sigmas))[:, None]


REDUCTION = sums(
    "rounding_flip", ("rounding_sigmas",), 1, _numbers, use=Use(on_prior=True, is_sampled=True)
)
