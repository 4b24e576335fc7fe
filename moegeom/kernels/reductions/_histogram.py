"""A histogram of one per-token quantity, shared by the reductions that keep one."""

from __future__ import annotations

from moegeom.geometry.float_bits import NUM_BINS
from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import (
    Extent,
    Kernels,
    Reduction,
    State,
    add_states,
    select_counts,
)


def histogram_of(quantity: str) -> Reduction:
    """The reduction that counts ``quantity`` (values >= 0) in the bins of ``float_bits``."""

    class Histogram:
        def __init__(self, extent: Extent) -> None:
            self._bins = extent.zeros(NUM_BINS)

        def fold(self, quantities: Quantities, kernels: Kernels) -> None:
            kernels["count_bins"](
                self._bins,
                getattr(quantities, quantity),
                quantities.population,
                quantities.block,
            )

        def state(self) -> State:
            return {"bins": self._bins}

    return Reduction(
        name=f"{quantity}_histogram",
        needs=(quantity,),
        start=Histogram,
        merge=add_states,
        select=lambda state, population, without: select_counts(state["bins"], population, without),
    )
