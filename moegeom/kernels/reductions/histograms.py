"""Histograms of quantities of a token, in bins cut at powers of two."""

from __future__ import annotations

import numpy as np

from moegeom.geometry.histogram import LOWEST_EXPONENT, NUM_BINS
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels, Use, counters, histogram, histogram_of

#: Margins in bins cut at powers of two.
MARGIN_HISTOGRAM = histogram("margin", use=Use(on_prior=True))


def _effective_margin(batch: TokenBatch) -> np.ndarray:
    assert batch.effective_margin is not None
    return batch.effective_margin


#: Margins, those of groups among them at half their size, in bins cut at powers of two.
TIGHTNESS_HISTOGRAM = histogram_of(
    "effective_margin_histogram", ("margin",), _effective_margin, use=Use(of_flip=True)
)


#: Boundary distances in bins cut at powers of two.
DISTANCE_HISTOGRAM = histogram("distance", use=Use(on_prior=True))


def _in_units(distance: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """``distance / unit``; 0 on a boundary and inf elsewhere for a unit of 0: an input of zeros."""
    scaled = distance / np.where(unit > 0.0, unit, 1.0)
    return np.where((unit > 0.0) | (distance == 0.0), scaled, np.inf)


def _relative(batch: TokenBatch) -> np.ndarray:
    assert batch.distance is not None and batch.input_norm is not None
    return _in_units(batch.distance, batch.input_norm)


#: Boundary distances over the length of the router input, in bins cut at powers of two.
RELATIVE_DISTANCE_HISTOGRAM = histogram_of(
    "relative_distance_histogram", ("distance", "input_norm"), _relative, use=Use(on_prior=True)
)


def _sigmas(batch: TokenBatch) -> np.ndarray:
    assert batch.distance is not None and batch.noise_scale is not None
    return _in_units(batch.distance, batch.noise_scale)


#: Boundary distances in standard deviations of bfloat16 rounding of the input, in bins.
NOISE_SIGMAS_HISTOGRAM = histogram_of(
    "noise_sigmas_histogram",
    ("distance", "noise_scale", "input_norm"),
    _sigmas,
    use=Use(on_prior=True),
)


def _widths(batch: TokenBatch) -> np.ndarray:
    lower, upper = batch.distance, batch.distance_upper
    assert lower is not None and upper is not None
    width = np.where(lower == upper, 0.0, np.inf)  # inf also where the lower bound is 0
    open_ = (lower != upper) & (lower > 0.0)
    with np.errstate(over="ignore"):
        ratio = upper[open_] / lower[open_]
    width[open_] = np.maximum(ratio - 1.0, 2.0**LOWEST_EXPONENT)
    return width


#: How wide the bracket of each boundary distance is: upper over lower bound less 1, in bins.
#: The first bin holds the exact ones alone.
BRACKET_HISTOGRAM = histogram_of(
    "bracket_histogram", ("distance", "distance_upper"), _widths, use=Use(on_prior=True)
)


#: Angle to the nearest boundary before the norm, in bins cut at powers of two; for a sample.
ANGLE_HISTOGRAM = histogram("angle", use=Use(on_prior=True, is_sampled=True))


#: Nearest boundary in standard deviations of the rounding of each coordinate; for a sample.
ROUNDING_SIGMAS_HISTOGRAM = histogram("rounding_sigmas", use=Use(on_prior=True, is_sampled=True))


def _moved(batch: TokenBatch) -> np.ndarray:
    assert batch.flip is not None
    return np.nan_to_num(batch.flip.weight_moved)


#: Routing weight that a variant moves to other experts, in bins cut at powers of two.
WEIGHT_MOVED_HISTOGRAM = histogram_of(
    "weight_moved_histogram", ("flip",), _moved, use=Use(of_flip=True)
)


def _count_flipped(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    assert batch.flip is not None and batch.effective_margin is not None
    row = np.flatnonzero(batch.flip.differs)
    labels = batch.population[row], batch.block[row]
    kernels["count_bins"](counts, batch.effective_margin[row], *labels)


#: The same margins as ``effective_margin_histogram``, of the tokens that a variant flips.
FLIPPED_TIGHTNESS_HISTOGRAM = counters(
    "flipped_effective_margin_histogram",
    ("flip", "margin"),
    lambda extent: (NUM_BINS,),
    _count_flipped,
    use=Use(of_flip=True),
)


#: Histograms of the state, one after the other.
EARLY, LATE = range(2)


def _count_exit_times(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    noise = batch.noise
    assert noise is not None
    for which, times in ((EARLY, noise.exit_early), (LATE, noise.exit_late)):
        if times is not None:
            histogram = np.zeros((*counts.shape[:2], NUM_BINS), np.int64)
            labels = batch.population[noise.row], batch.block[noise.row]
            kernels["count_bins"](histogram, times, *labels)
            counts[..., which, :] += histogram


#: Bounds on the exit times of a diffusion, for the tokens that were looked at more closely.
EXIT_TIME_HISTOGRAMS = counters(
    "exit_time_histograms",
    ("noise",),
    lambda extent: (2, NUM_BINS),
    _count_exit_times,
    use=Use(is_sampled=True),
)
