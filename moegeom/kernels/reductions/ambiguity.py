"""Tokens whose choice two correct float32 engines may make differently."""

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
BOUNDED, AMBIGUOUS = range(2)


class _Ambiguity:
    def __init__(self, extent: Extent) -> None:
        self._counts = extent.zeros(2)

    def fold(self, quantities: Quantities, kernels: Kernels) -> None:
        tightness, bound = quantities.tightness, quantities.float_bound
        assert tightness is not None and bound is not None
        populations = len(self._counts)
        self._counts[..., BOUNDED] += quantities.count_labels(populations)
        self._counts[..., AMBIGUOUS] += quantities.count_labels(populations, tightness <= bound)

    def state(self) -> State:
        return {"counts": self._counts}


REDUCTION = Reduction(
    name="ambiguity",
    needs=("margin", "float_bound", "input_norm"),
    start=_Ambiguity,
    merge=add_states,
    select=lambda state, population, without: select_counts(state["counts"], population, without),
)
