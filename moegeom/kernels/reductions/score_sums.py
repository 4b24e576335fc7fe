"""Sums of each expert's probability."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.reductions._counters import counters

#: Probabilities are summed as integers of 2^-36: 2^27 tokens fit into one counter.
FIXED_POINT = 2.0**36


def _fold(counts: np.ndarray, quantities: Quantities, kernels: Kernels) -> None:
    assert quantities.probability is not None
    kernels["add_scores"](counts, quantities.probability, quantities.population, quantities.block)


REDUCTION = counters("score_sums", ("probability",), lambda extent: (extent.num_experts,), _fold)
