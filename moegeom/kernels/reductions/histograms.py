"""Histograms of quantities of a token, in bins cut at powers of two."""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.geometry.histogram import LOWEST_EXPONENT, NUM_BINS
from moegeom.geometry.rows import ROWS_IN_CACHE
from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch
from moegeom.kernels.reduction import (
    FIXED_POINT,
    Kernels,
    Use,
    block_counters,
    counters,
    histogram,
    histogram_of,
    sums,
)

#: Margins in bins cut at powers of two.
MARGIN_HISTOGRAM = histogram("margin")


def _effective_margin(batch: TokenBatch) -> np.ndarray:
    assert batch.effective_margin is not None
    return batch.effective_margin


#: Margins, those of groups among them at half their size, in bins cut at powers of two.
TIGHTNESS_HISTOGRAM = histogram_of(
    "effective_margin_histogram", ("margin",), _effective_margin, use=Use(of_flip=True)
)


#: Boundary distances in bins cut at powers of two.
DISTANCE_HISTOGRAM = histogram("distance")


def _in_units(distance: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """``distance / unit``; 0 on a boundary and inf elsewhere for a unit of 0: an input of zeros."""
    scaled = distance / np.where(unit > 0.0, unit, 1.0)
    return np.where((unit > 0.0) | (distance == 0.0), scaled, np.inf)


def _relative(batch: TokenBatch) -> np.ndarray:
    assert batch.distance is not None and batch.input_norm is not None
    return _in_units(batch.distance, batch.input_norm)


#: Boundary distances over the length of the router input, in bins cut at powers of two.
RELATIVE_DISTANCE_HISTOGRAM = histogram_of(
    "relative_distance_histogram", ("distance", "input_norm"), _relative
)


def _sigmas(batch: TokenBatch) -> np.ndarray:
    assert batch.distance is not None and batch.noise_scale is not None
    return _in_units(batch.distance, batch.noise_scale)


#: Boundary distances in standard deviations of bfloat16 rounding of the input, in bins.
NOISE_SIGMAS_HISTOGRAM = histogram_of(
    "noise_sigmas_histogram", ("distance", "noise_scale", "input_norm"), _sigmas
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
BRACKET_HISTOGRAM = histogram_of("bracket_histogram", ("distance", "distance_upper"), _widths)


#: Angle to the nearest boundary before the norm, in bins cut at powers of two; for a sample.
ANGLE_HISTOGRAM = histogram("angle", use=Use(is_sampled=True))


#: Nearest boundary in standard deviations of the rounding of each coordinate; for a sample.
ROUNDING_SIGMAS_HISTOGRAM = histogram("rounding_sigmas", use=Use(is_sampled=True))


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


# --------------------------------------------------------------------------------------------- sums


def _entropies(batch: TokenBatch) -> Float64[np.ndarray, "tokens columns"]:
    assert batch.entropy is not None and batch.probability is not None
    of_chosen = np.take_along_axis(batch.probability, np.maximum(batch.chosen, 0), axis=1)
    of_chosen = np.where(batch.chosen >= 0, of_chosen.astype(np.float64), 0.0)
    mass = of_chosen.sum(axis=1)
    # all of them underflow to 0 where a bias chooses experts without score
    share = of_chosen / np.where(mass > 0.0, mass, 1.0)[:, None]
    inside = -(share * np.log(np.where(share > 0.0, share, 1.0))).sum(axis=1)
    return np.stack([batch.entropy, inside, mass], axis=1)


#: Sums of the entropy of each token's scores, over all experts and over the chosen ones.
ROUTING_ENTROPY = sums("routing_entropy", ("entropy", "probability"), 3, _entropies)


def _fills(batch: TokenBatch) -> np.ndarray:
    assert batch.fill_decides is not None
    return batch.fill_decides.astype(np.float64)[:, None]


#: Tokens at which the fill of the group mask decides the chosen set.
MASK_FILL = sums("mask_fill", ("fill_decides",), 1, _fills)


def _weight_sums(batch: TokenBatch) -> np.ndarray:
    assert batch.weight_sum is not None
    return np.nan_to_num(batch.weight_sum)[:, None]  # nan: a sum of 0 without a guard


#: Sums of the routing weights of a token that were divided by their guarded sum.
WEIGHT_SUM = sums("weight_sum", ("weight_sum",), 1, _weight_sums)


def _add_scores(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    assert batch.probability is not None
    kernels["add_scores"](counts, batch.probability, batch.population, batch.block)


#: Sums of each expert's probability.
SCORE_SUMS = counters(
    "score_sums", ("probability",), lambda extent: (extent.num_experts,), _add_scores
)


# Squares of trained routers reach from 1e-2 to 1e5 and must add up exactly in any order, so each is
# split into a whole multiple of 2^20 and a rest. Tokens beyond what is added up so are counted:
# with any of them the sums are not known.

#: Last axis of the counters: tokens, multiples of 2^20, rests and log-sum-exps (units of 2^-18),
#: tokens that are beyond LARGEST_LSE.
LSE_TOKENS, LSE_LARGE, LSE_REST, LSE_PLAIN, LSE_BEYOND = range(5)

LARGE_UNIT = 2.0**20
LSE_FIXED_POINT = 2.0**18

#: Beyond it a log-sum-exp is not added up; no router that works comes near it.
LARGEST_LSE = 2.0**20


def _add_log_sum_exp(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    assert batch.log_sum_exp is not None
    is_beyond = ~(np.abs(batch.log_sum_exp) <= LARGEST_LSE)
    value = np.where(is_beyond, 0.0, batch.log_sum_exp)
    large, rest = np.divmod(value**2, LARGE_UNIT)
    for column, weights in (
        (LSE_TOKENS, None),
        (LSE_LARGE, large),
        (LSE_REST, np.rint(rest * LSE_FIXED_POINT)),
        (LSE_PLAIN, np.rint(value * LSE_FIXED_POINT)),
        (LSE_BEYOND, is_beyond.astype(np.float64)),
    ):
        counts[..., column] += batch.count_labels(len(counts), weights)


#: Sums of the log-sum-exp of the logits and of its square.
LOG_SUM_EXP = counters("log_sum_exp", ("log_sum_exp",), lambda extent: (5,), _add_log_sum_exp)


def _add_directions(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    assert batch.direction is not None
    member = np.zeros((NUM_BLOCKS, len(batch.block)))
    member[batch.block, np.arange(len(batch.block))] = 1.0
    # whole numbers below 2^53: the product is exact in any order of summation
    total = np.zeros((NUM_BLOCKS, batch.direction.shape[1]))
    for start in range(0, len(batch.block), ROWS_IN_CACHE):
        there = slice(start, start + ROWS_IN_CACHE)
        total += member[:, there] @ np.rint(batch.direction[there] * FIXED_POINT)
    counts[:, 0] += np.bincount(batch.block, minlength=NUM_BLOCKS)
    counts[:, 1:] += total.astype(np.int64)


#: Sum of the unit vectors of the router inputs, and number of tokens; for a sample of tokens.
#: Blocks only: a sum for each domain would be as large as the router itself.
DIRECTIONS = block_counters(
    "directions",
    ("direction",),
    lambda extent: (1 + extent.hidden_size,),
    _add_directions,
    lambda counts: (counts[1:] / FIXED_POINT, int(counts[0])),
    use=Use(of_random_router=False, is_sampled=True),
)


def _add_cosines(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    outputs = batch.expert_output
    assert outputs is not None
    for token, block in enumerate(batch.block):
        rows = outputs[token].astype(np.float64)
        length = np.sqrt((rows**2).sum(axis=1))
        rows /= np.where(length > 0.0, length, 1.0)[:, None]
        counts[block, 1:] += np.rint(rows @ rows.T * FIXED_POINT).astype(np.int64)
        counts[block, 0] += 1


def _mean_cosines(counts: np.ndarray) -> tuple[int, np.ndarray]:
    """Number of tokens, and mean cosine of each two experts (nan without tokens)."""
    tokens, total = int(counts[0, 0]), counts[1:] / FIXED_POINT
    return tokens, total / tokens if tokens else np.full(total.shape, np.nan)


#: Cosines between the outputs of each two experts on the same token, added up behind a row of
#: tokens.
OUTPUT_COSINES = block_counters(
    "output_cosines",
    ("expert_output",),
    lambda extent: (1 + extent.num_experts, extent.num_experts),
    _add_cosines,
    _mean_cosines,
    use=Use(of_random_router=False),
)
