"""Reductions whose state is one array of integer counters, added up on merge."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moegeom.geometry.arithmetic.float_bits import NUM_BINS
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import ANY_USE, Extent, Kernels, Reduction, State, Use, select_counts

#: Adds a batch to the counters [populations, blocks, ...].
Fold = Callable[[np.ndarray, TokenBatch, Kernels], None]


def counters(
    name: str,
    needs: tuple[str, ...],
    shape: Callable[[Extent], tuple[int, ...]],
    fold: Fold,
    use: Use = ANY_USE,
) -> Reduction:
    """A reduction that keeps counters of ``shape`` for each population and block."""

    class Counters:
        def __init__(self, extent: Extent) -> None:
            self._counts = extent.zeros(*shape(extent))

        def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
            fold(self._counts, batch, kernels)

        def state(self) -> State:
            return {"counts": self._counts}

    return Reduction(
        name=name,
        needs=needs,
        start=Counters,
        merge=lambda first, second: {"counts": first["counts"] + second["counts"]},
        select=lambda state, population, without: select_counts(
            state["counts"], population, without
        ),
        use=use,
    )


def histogram_of(
    name: str,
    needs: tuple[str, ...],
    values: Callable[[TokenBatch], np.ndarray],
    use: Use = ANY_USE,
) -> Reduction:
    """Counts of ``values`` (at least 0) in the bins of ``geometry.float_bits``."""

    def fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
        kernels["count_bins"](counts, values(batch), batch.population, batch.block)

    return counters(name, needs, lambda extent: (NUM_BINS,), fold, use)


def histogram(quantity: str, use: Use = ANY_USE) -> Reduction:
    """Counts of a quantity of the tokens by bin."""
    return histogram_of(
        f"{quantity}_histogram", (quantity,), lambda batch: getattr(batch, quantity), use
    )
