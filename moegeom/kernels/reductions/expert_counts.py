"""Chosen slots by expert."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.reductions._counters import counters


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    kernels["count_experts"](counts, batch.chosen, batch.population, batch.block)


REDUCTION = counters("expert_counts", ("chosen",), lambda extent: (extent.num_experts,), _fold)
