"""Reductions whose state is integer counters, added up on merge: counts, histograms, sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float64

from moegeom.geometry.histogram import NUM_BINS
from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch
from moegeom.kernels.reduction import (
    ANY_USE,
    Accumulator,
    Extent,
    Kernels,
    Reduction,
    SettledCounts,
    State,
    Use,
    total_of,
)

#: Probabilities, shares, cosines and coordinates, at most 1, are summed as integers of 2^-36: the
#: sum of a batch of 2^14 tokens is below 2^53, so exact in float64, and 2^27 tokens fit into one
#: counter.
FIXED_POINT = 2.0**36

#: Tokens of one population and block, and tokens in all where one expert has everything.
MOST_TOKENS = 2**27

#: Adds a batch to the counters [populations, blocks, ...], or [blocks, ...].
Fold = Callable[[np.ndarray, TokenBatch, Kernels], None]


def counters(
    name: str,
    needs: tuple[str, ...],
    shape: Callable[[Extent], tuple[int, ...]],
    fold: Fold,
    use: Use = ANY_USE,
) -> Reduction:
    """A reduction that keeps counters of ``shape`` for each population and block."""
    return Reduction(
        name=name,
        needs=needs,
        start=_counting(lambda extent: extent.zeros(*shape(extent)), fold),
        merge=added,
        select=SettledCounts.select,
        settle=SettledCounts.of,
        use=use,
    )


def block_counters(
    name: str,
    needs: tuple[str, ...],
    shape: Callable[[Extent], tuple[int, ...]],
    fold: Fold,
    read: Callable[[np.ndarray], Any],
) -> Reduction:
    """Counters of ``shape`` for each block alone; ``read`` is what is made of their total."""

    def select(state: State, population: int | None, without: int | None) -> Any:
        return read(block_total(state["counts"], population, without))

    def start(extent: Extent) -> np.ndarray:
        return np.zeros((NUM_BLOCKS, *shape(extent)), dtype=np.int64)

    return Reduction(name, needs, _counting(start, fold), added, select)


def block_total(counts: np.ndarray, population: int | None, without: int | None) -> np.ndarray:
    """Counts [blocks, *tail] summed to [*tail]; zeros for a single population, which has none."""
    kept = np.full(NUM_BLOCKS, population is None)
    if without is not None:
        kept[without] = False
    return total_of(counts[kept])


def added(first: State, second: State) -> State:
    """Arrays of one name added up."""
    return {name: first[name] + second[name] for name in first}


def _counting(start: Callable[[Extent], np.ndarray], fold: Fold) -> Callable[[Extent], Accumulator]:
    class Counters:
        def __init__(self, extent: Extent) -> None:
            self._counts = start(extent)

        def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
            fold(self._counts, batch, kernels)

        def state(self) -> State:
            return {"counts": self._counts}

    return Counters


def histogram_of(
    name: str,
    needs: tuple[str, ...],
    values: Callable[[TokenBatch], np.ndarray],
    use: Use = ANY_USE,
) -> Reduction:
    """Counts of ``values`` (at least 0) in the bins of ``geometry.histogram``."""

    def fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
        kernels["count_bins"](counts, values(batch), batch.population, batch.block)

    return counters(name, needs, lambda extent: (NUM_BINS,), fold, use)


def histogram(quantity: str, use: Use = ANY_USE) -> Reduction:
    """Counts of a quantity of the tokens by bin."""
    return histogram_of(
        f"{quantity}_histogram", (quantity,), lambda batch: getattr(batch, quantity), use
    )


# --------------------------------------------------------------------------------------------- sums
#: Numbers are summed as integers of 2^-32: up to 2^7 = 128 each, the sum of a batch of 2^14 tokens
#: is below 2^53, so exact in float64, and 2^24 tokens of that size fit into one counter.
_SUM_UNIT = 2.0**32
_LARGEST = 2.0**7

#: Numbers of each token, [tokens, columns], at most 128 in size.
Numbers = Callable[[TokenBatch], Float64[np.ndarray, "tokens columns"]]


def sums(
    name: str, needs: tuple[str, ...], num_columns: int, numbers: Numbers, use: Use = ANY_USE
) -> Reduction:
    """Tokens in the first counter, then sums of each column; see :func:`means`."""

    def fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
        values = np.rint(np.clip(numbers(batch), -_LARGEST, _LARGEST) * _SUM_UNIT)
        counts[..., 0] += batch.count_labels(len(counts))
        for column in range(num_columns):
            counts[..., column + 1] += batch.count_labels(len(counts), values[:, column])

    return counters(name, needs, lambda extent: (num_columns + 1,), fold, use)


def means(selected: np.ndarray) -> list[float | None]:
    """Mean of each column of a selected state; None without tokens."""
    tokens, *totals = selected.tolist()
    return [total / _SUM_UNIT / tokens if tokens else None for total in totals]
