"""Histogram bins cut from the bits of a float64: exact edges at every power of two."""

from __future__ import annotations

from functools import cache

import numpy as np

from moegeom.core.shapes import Float64, Int64

#: Bins within a factor of two: the upper four bits of the mantissa, 6 % wide.
BINS_PER_OCTAVE = 16
LOWEST_EXPONENT = -40
HIGHEST_EXPONENT = 24

#: First bin: everything below 2^-40, zero included. Last bin: 2^24 and above, inf included.
NUM_BINS = (HIGHEST_EXPONENT - LOWEST_EXPONENT) * BINS_PER_OCTAVE + 2

#: Upper 16 bits of the float64 number 2^-40: sign, exponent + 1023, four mantissa bits.
FIRST_CODE = (LOWEST_EXPONENT + 1023) * BINS_PER_OCTAVE


def bin_index(values: Float64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
    """Bin of each value >= 0: bin b > 0 holds [edge(b), edge(b + 1)) of :func:`bin_edges`."""
    code = (values + 0.0).view(np.int64) >> 48  # adding 0.0 turns -0.0, whose bits are odd, to 0.0
    return np.clip(code - FIRST_CODE + 1, 0, NUM_BINS - 1)


@cache
def bin_edges() -> Float64[np.ndarray, "edges"]:
    """The NUM_BINS + 1 edges: 0, 2^-40, ..., 2^24, inf."""
    codes = np.arange(FIRST_CODE, FIRST_CODE + NUM_BINS - 1, dtype=np.int64) << 48
    edges = np.concatenate([[0.0], codes.view(np.float64), [np.inf]])
    edges.setflags(write=False)
    return edges


def share_below(
    histogram: Int64[np.ndarray, "*batch bins"], thresholds: Float64[np.ndarray, "thresholds"]
) -> Float64[np.ndarray, "*batch thresholds"]:
    """Share of values below each threshold; exact when the threshold is an edge.

    Raises ValueError for a threshold that is no edge: a share must not be an interpolation.
    nan for an empty histogram.
    """
    edges = bin_edges()
    position = np.searchsorted(edges, thresholds)
    if not np.array_equal(edges[np.minimum(position, len(edges) - 1)], thresholds):
        raise ValueError(f"thresholds must be bin edges (powers of two among them): {thresholds}")
    below = np.concatenate(
        [np.zeros((*histogram.shape[:-1], 1)), np.cumsum(histogram, axis=-1)], axis=-1
    )
    total = np.where(below[..., -1:] == 0, np.nan, below[..., -1:])
    return below[..., position] / total


def quantile(
    histogram: Int64[np.ndarray, "*batch bins"], probabilities: Float64[np.ndarray, "probabilities"]
) -> Float64[np.ndarray, "*batch probabilities"]:
    """Quantiles, linear within a bin (so within 6 % of the value); nan for an empty histogram.

    The first bin counts as 0 and the last as inf: a quantile that falls there is 0 or inf.
    """
    edges, last = bin_edges(), histogram.shape[-1] - 1
    flat = histogram.reshape(-1, last + 1)
    result = np.full((len(flat), len(probabilities)), np.nan)
    for row, counts in enumerate(flat):
        below = np.cumsum(counts)
        if below[-1] == 0:
            continue
        target = probabilities * below[-1]
        index = np.minimum(np.searchsorted(below, target, side="left"), last)
        inner = np.minimum(index, last - 1)
        within = (target - below[inner] + counts[inner]) / np.maximum(counts[inner], 1)
        result[row] = edges[inner] + within * (edges[inner + 1] - edges[inner])
        result[row, index == 0] = 0.0
        result[row, index == last] = np.inf
    return result.reshape(*histogram.shape[:-1], len(probabilities))


def share_up_to(
    histogram: Int64[np.ndarray, "*batch bins"], values: Float64[np.ndarray, "values"]
) -> Float64[np.ndarray, "values *batch"]:
    """Share up to each of ``values``, linear within its bin: the inverse of :func:`quantile`.

    nan for an empty histogram. For 2^-40 <= value < 2^24.
    """
    edges, at, below = bin_edges(), bin_index(values), np.cumsum(histogram, axis=-1)
    within = (values - edges[at]) / (edges[at + 1] - edges[at])
    shares = below[..., at - 1] + within * histogram[..., at]
    return np.moveaxis(shares / np.where(below[..., -1:] == 0, np.nan, below[..., -1:]), -1, 0)


def lowest(histogram: Int64[np.ndarray, "bins"]) -> float:
    """Lower edge of the first bin that holds a value: at most 6 % below the least value.

    0 when a value is below 2^-40; nan for an empty histogram.
    """
    seen = np.flatnonzero(histogram)
    return float(bin_edges()[seen[0]]) if len(seen) else float("nan")


# ----------------------------------------------------------------------------------- two histograms
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
