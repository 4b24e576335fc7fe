"""The same margins as ``tightness_histogram``, of the tokens that a variant switches."""

from __future__ import annotations

import numpy as np

from moegeom.geometry.arithmetic.float_bits import NUM_BINS
from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import Kernels, Use
from moegeom.kernels.reductions._counters import counters


def _fold(counts: np.ndarray, quantities: Quantities, kernels: Kernels) -> None:
    assert quantities.switch is not None and quantities.tightness is not None
    row = np.flatnonzero(quantities.switch.differs)
    labels = quantities.population[row], quantities.block[row]
    kernels["count_bins"](counts, quantities.tightness[row], *labels)


REDUCTION = counters(
    "switched_tightness_histogram",
    ("switch", "margin"),
    lambda extent: (NUM_BINS,),
    _fold,
    use=Use(of_switch=True),
)
