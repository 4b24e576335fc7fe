"""Tokens, exact ties, and tokens whose choice two correct engines may make differently."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import (
    Extent,
    Kernels,
    Reduction,
    State,
    add_states,
    select_counts,
)

#: Columns of the counter array. ``bounded`` counts the tokens for which a float bound is known.
TOKENS, TIES, BOUNDED, AMBIGUOUS = range(4)


class _Tokens:
    def __init__(self, extent: Extent) -> None:
        self._counts = extent.zeros(4)

    def fold(self, quantities: Quantities, kernels: Kernels) -> None:
        facts = np.zeros((len(quantities.chosen), 4), dtype=np.int64)
        facts[:, TOKENS] = 1
        tightness = quantities.tightness
        if tightness is not None:
            facts[:, TIES] = tightness == 0.0
        if tightness is not None and quantities.float_bound is not None:
            facts[:, BOUNDED] = 1
            facts[:, AMBIGUOUS] = tightness <= quantities.float_bound
        np.add.at(self._counts, (quantities.population, quantities.block), facts)

    def state(self) -> State:
        return {"counts": self._counts}


REDUCTION = Reduction(
    name="token_counts",
    needs=("chosen",),
    start=_Tokens,
    merge=add_states,
    select=lambda state, population, without: select_counts(state["counts"], population, without),
)
