"""Tokens, and those on an exact tie."""

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

#: Columns of the counter array.
TOKENS, TIES = range(2)


class _Tokens:
    def __init__(self, extent: Extent) -> None:
        self._counts = extent.zeros(2)

    def fold(self, quantities: Quantities, kernels: Kernels) -> None:
        populations = len(self._counts)
        self._counts[..., TOKENS] += quantities.count_labels(populations)
        if quantities.tightness is not None:
            tied = quantities.tightness == 0.0
            self._counts[..., TIES] += quantities.count_labels(populations, tied)

    def state(self) -> State:
        return {"counts": self._counts}


REDUCTION = Reduction(
    name="token_counts",
    needs=("chosen",),
    start=_Tokens,
    merge=add_states,
    select=lambda state, population, without: select_counts(state["counts"], population, without),
)
