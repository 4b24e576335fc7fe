"""Sums of scores, directions, outputs and near-ties."""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.geometry.rows import ROWS_IN_CACHE
from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch
from moegeom.kernels.reduction import (
    FIXED_POINT,
    Extent,
    Kernels,
    Reduction,
    State,
    Use,
    added,
    block_total,
    counters,
    sums,
)


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


#: Widths in units of the selection score; at 0 ties are exact.
LADDER = np.array([0.0, *2.0 ** np.arange(-8.0, 1.0, 2.0)])

#: Last axis of the counters: extra experts, then tokens of order 0, 1, 2 ...
EXTRAS, FIRST_ORDER = 0, 1


def _count_orders(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    assert batch.selection is not None
    (_, experts), top_k = batch.selection.shape, batch.chosen.shape[1]
    orders, extras = kernels["near_ties"](batch.selection, top_k, LADDER)
    for step in range(len(LADDER)):
        counts[..., step, EXTRAS] += batch.count_labels(len(counts), extras[:, step])
        # orders are below the number of experts: one more label beside population and block
        place = batch.population, batch.block, FIRST_ORDER + orders[:, step]
        np.add.at(counts[..., step, : FIRST_ORDER + experts], place, 1)


#: Near-ties at the border of the chosen set, on a ladder of widths; for a sample of tokens.
NEAR_TIES = counters(
    "orders",
    ("selection",),
    lambda extent: (len(LADDER), FIRST_ORDER + extent.num_experts),
    _count_orders,
    use=Use(on_prior=True, is_sampled=True),
)


class _Directions:
    """Blocks only, no populations: a sum for each domain would be as large as the router itself."""

    def __init__(self, extent: Extent) -> None:
        self._sums = np.zeros((NUM_BLOCKS, extent.hidden_size), dtype=np.int64)
        self._tokens = np.zeros(NUM_BLOCKS, dtype=np.int64)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        assert batch.direction is not None
        member = np.zeros((NUM_BLOCKS, len(batch.block)))
        member[batch.block, np.arange(len(batch.block))] = 1.0
        # whole numbers below 2^53: the product is exact in any order of summation
        total = np.zeros(self._sums.shape)
        for start in range(0, len(batch.block), ROWS_IN_CACHE):
            there = slice(start, start + ROWS_IN_CACHE)
            total += member[:, there] @ np.rint(batch.direction[there] * FIXED_POINT)
        self._sums += total.astype(np.int64)
        self._tokens += np.bincount(batch.block, minlength=NUM_BLOCKS)

    def state(self) -> State:
        return {"sums": self._sums, "tokens": self._tokens}


def _select_directions(
    state: State, population: int | None, without: int | None
) -> tuple[np.ndarray, int]:
    """Sum of unit vectors and number of tokens; no token for a single population."""
    total, tokens = (block_total(state[name], population, without) for name in ("sums", "tokens"))
    return total / FIXED_POINT, int(tokens)


#: Sums of the unit vectors of the router inputs, by block; for a sample of tokens.
DIRECTIONS = Reduction(
    "directions",
    ("direction",),
    _Directions,
    added,
    _select_directions,
    use=Use(of_random_router=False, is_sampled=True),
)


class _Cosines:
    """Blocks only, no populations; first the tokens, then the sums of each pair of experts."""

    def __init__(self, extent: Extent) -> None:
        self._tokens = np.zeros(NUM_BLOCKS, dtype=np.int64)
        shape = (NUM_BLOCKS, extent.num_experts, extent.num_experts)
        self._sums = np.zeros(shape, dtype=np.int64)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        outputs = batch.expert_output
        assert outputs is not None
        for token, block in enumerate(batch.block):
            rows = outputs[token].astype(np.float64)
            length = np.sqrt((rows**2).sum(axis=1))
            rows /= np.where(length > 0.0, length, 1.0)[:, None]
            self._sums[block] += np.rint(rows @ rows.T * FIXED_POINT).astype(np.int64)
        self._tokens += np.bincount(batch.block, minlength=NUM_BLOCKS)

    def state(self) -> State:
        return {"tokens": self._tokens, "sums": self._sums}


def _select_cosines(
    state: State, population: int | None, without: int | None
) -> tuple[int, np.ndarray]:
    """Number of tokens, and mean cosine of each two experts (nan without tokens)."""
    total, tokens = (block_total(state[name], population, without) for name in ("sums", "tokens"))
    total = total / FIXED_POINT
    return int(tokens), total / tokens if tokens else np.full(total.shape, np.nan)


#: Cosines between the outputs of each two experts on the same token, added up.
OUTPUT_COSINES = Reduction(
    name="output_cosines",
    needs=("expert_output",),
    start=_Cosines,
    merge=added,
    select=_select_cosines,
    use=Use(of_random_router=False),
)
