"""Chosen slots by expert."""

from __future__ import annotations

from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import (
    Extent,
    Kernels,
    Reduction,
    State,
    add_states,
    select_counts,
)


class _Counts:
    def __init__(self, extent: Extent) -> None:
        self._counts = extent.zeros(extent.num_experts)

    def fold(self, quantities: Quantities, kernels: Kernels) -> None:
        kernels["count_experts"](
            self._counts, quantities.chosen, quantities.population, quantities.block
        )

    def state(self) -> State:
        return {"counts": self._counts}


REDUCTION = Reduction(
    name="expert_counts",
    needs=("chosen",),
    start=_Counts,
    merge=add_states,
    select=lambda state, population, without: select_counts(state["counts"], population, without),
)
