"""What noise on the router input does: sums of probabilities, and counts of a simulation."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import Kernels, Use
from moegeom.kernels.reductions._counters import counters
from moegeom.kernels.reductions.bf16_switch import FIXED_POINT

#: Columns of the counter array; probabilities are summed in units of 1 / FIXED_POINT.
TOKENS, LOWER, ESTIMATE, UPPER, SIMULATED, DRAWN = range(6)


def _fold(counts: np.ndarray, quantities: Quantities, kernels: Kernels) -> None:
    noise = quantities.noise
    assert noise is not None
    counts[..., TOKENS] += quantities.count_labels(len(counts))
    columns = {LOWER: noise.lower, ESTIMATE: noise.estimate, UPPER: noise.upper}
    for column, probability in columns.items():
        if probability is not None:
            units = np.rint(probability * FIXED_POINT)
            counts[..., column] += quantities.count_labels(len(counts), units)
    switched, drawn = np.zeros((2, len(quantities.token)))
    switched[noise.row], drawn[noise.row] = noise.switched, noise.draws
    counts[..., SIMULATED] += quantities.count_labels(len(counts), switched)
    counts[..., DRAWN] += quantities.count_labels(len(counts), drawn)


REDUCTION = counters(
    "noise_switches", ("noise",), lambda extent: (6,), _fold, use=Use(is_sampled=True)
)
