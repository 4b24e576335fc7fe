"""Reductions that add up numbers of a token, in fixed point."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float64

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import ANY_USE, Kernels, Reduction, Use
from moegeom.kernels.reductions._counters import counters

#: Numbers are summed as integers of 2^-32: up to 2^7 = 128 each, the sum of a batch of 2^14 tokens
#: is below 2^53, so exact in float64, and 2^24 tokens of that size fit into one counter.
FIXED_POINT = 2.0**32
LARGEST = 2.0**7

#: Numbers of each token, [tokens, columns], at most LARGEST in size.
Numbers = Callable[[TokenBatch], Float64[np.ndarray, "tokens columns"]]


def sums(
    name: str, needs: tuple[str, ...], num_columns: int, numbers: Numbers, use: Use = ANY_USE
) -> Reduction:
    """Tokens in the first counter, then sums of each column; see :func:`means`."""

    def fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
        values = np.rint(np.clip(numbers(batch), -LARGEST, LARGEST) * FIXED_POINT)
        counts[..., 0] += batch.count_labels(len(counts))
        for column in range(num_columns):
            counts[..., column + 1] += batch.count_labels(len(counts), values[:, column])

    return counters(name, needs, lambda extent: (num_columns + 1,), fold, use)


def means(selected: np.ndarray) -> list[float | None]:
    """Mean of each column of a selected state; None without tokens."""
    tokens, *totals = selected.tolist()
    return [total / FIXED_POINT / tokens if tokens else None for total in totals]
