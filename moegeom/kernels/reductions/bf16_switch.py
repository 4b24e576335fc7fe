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

#: Probabilities are summed as integers of 2^-40: exact merges, room for 2^23 million tokens.
FIXED_POINT = 2.0**40


class _Switch:
    def __init__(self, extent: Extent) -> None:
        self._sums = extent.zeros(2)

    def fold(self, quantities: Quantities, kernels: Kernels) -> None:
        assert quantities.distance is not None and quantities.noise_scale is not None
        probability = switch_probability(quantities.distance, quantities.noise_scale)
        facts = np.ones((len(probability), 2), dtype=np.int64)
        facts[:, 1] = np.rint(probability * FIXED_POINT)
        np.add.at(self._sums, (quantities.population, quantities.block), facts)

    def state(self) -> State:
        return {"sums": self._sums}


REDUCTION = Reduction(
    name="bf16_switch",
    needs=("distance", "noise_scale"),
    start=_Switch,
    merge=add_states,
    select=lambda state, population, without: select_counts(state["sums"], population, without),
)
