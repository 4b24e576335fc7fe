"""Expected number of tokens that rounding the router input to bfloat16 switches."""

from __future__ import annotations

import numpy as np

from moegeom.geometry.rounding import switch_probability
from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import (
    Extent,
    Kernels,
    Reduction,
    State,
    add_states,
    select_counts,
)

#: Probabilities (at most 1/2) are summed as integers of 2^-36: the sum of a batch of 2^14 tokens is
#: below 2^53, so exact in float64, and 2^28 tokens fit into one population and block.
FIXED_POINT = 2.0**36


class _Switch:
    def __init__(self, extent: Extent) -> None:
        self._sums = extent.zeros(2)

    def fold(self, quantities: Quantities, kernels: Kernels) -> None:
        assert quantities.distance is not None and quantities.noise_scale is not None
        probability = switch_probability(quantities.distance, quantities.noise_scale)
        populations = len(self._sums)
        self._sums[..., 0] += quantities.count_labels(populations)
        self._sums[..., 1] += quantities.count_labels(
            populations, np.rint(probability * FIXED_POINT)
        )

    def state(self) -> State:
        return {"sums": self._sums}


REDUCTION = Reduction(
    name="bf16_switch",
    needs=("distance", "noise_scale", "input_norm"),
    start=_Switch,
    merge=add_states,
    select=lambda state, population, without: select_counts(state["sums"], population, without),
)
