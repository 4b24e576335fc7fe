"""Chosen slots by expert."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.reductions._counters import counters


def _fold(counts: np.ndarray, quantities: Quantities, kernels: Kernels) -> None:
    kernels["count_experts"](counts, quantities.chosen, quantities.population, quantities.block)


REDUCTION = counters("expert_counts", ("chosen",), lambda extent: (extent.num_experts,), _fold)
