"""Where some of the counted values stand among all of them, from two histograms."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64


def mean_rank(some: Int64[np.ndarray, "bins"], whole: Int64[np.ndarray, "bins"]) -> float:
    """Mean share of ``whole`` below a value of ``some``, equal bins counting half.

    0 for the least values, 1/2 for values like any; exact but for the width of a bin. nan when
    either is empty. Source: Mann and Whitney 1947. Oracle in tests: scipy.stats.rankdata.
    """
    if not some.any() or not whole.any():
        return float("nan")
    below = np.cumsum(whole) - whole
    return float(some @ (below + whole / 2.0) / (some.sum() * float(whole.sum())))


def share_among_least(
    some: Int64[np.ndarray, "bins"], whole: Int64[np.ndarray, "bins"], share: float
) -> float:
    """Share of ``some`` among that ``share`` of ``whole`` with the least values.

    The bin that is cut counts in proportion, as if its values were mixed. nan when either is empty.
    """
    if not some.any() or not whole.any():
        return float("nan")
    left = share * whole.sum() - (np.cumsum(whole) - whole)
    inside = np.clip(left / np.maximum(whole, 1), 0.0, 1.0)
    return float(some @ inside / some.sum())
