"""Sums of the entropy of each token's scores, over all experts and over the chosen ones."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reductions._sums import sums


def _numbers(batch: TokenBatch) -> Float64[np.ndarray, "tokens columns"]:
    assert batch.entropy is not None and batch.probability is not None
    of_chosen = np.take_along_axis(batch.probability, batch.chosen, axis=1)
    of_chosen = of_chosen.astype(np.float64)
    mass = of_chosen.sum(axis=1)
    # all of them underflow to 0 where a bias chooses experts without score
    share = of_chosen / np.where(mass > 0.0, mass, 1.0)[:, None]
    inside = -(share * np.log(np.where(share > 0.0, share, 1.0))).sum(axis=1)
    return np.stack([batch.entropy, inside, mass], axis=1)


REDUCTION = sums("routing_entropy", ("entropy", "probability"), 3, _numbers)
