"""Counts of chosen experts, pairs and sets."""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Bool, Int64
from moegeom.core.tokens import TILE
from moegeom.kernels.batch import TokenBatch, on_host
from moegeom.kernels.reduction import (
    Extent,
    Kernels,
    Reduction,
    SettledCounts,
    State,
    StateView,
    Use,
    block_counters,
    counters,
)

# ------------------------------------------------------------------------------------------- tokens
#: Columns of the counter array.
TOKENS, TIES = range(2)


def _count_tokens(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    counts[..., TOKENS] += batch.count_labels(len(counts))
    if batch.effective_margin is not None:
        counts[..., TIES] += batch.count_labels(len(counts), batch.effective_margin == 0.0)


#: Tokens, and those on an exact tie.
TOKEN_COUNTS = counters(
    "token_counts",
    ("chosen",),
    lambda extent: (2,),
    _count_tokens,
    use=Use(of_flip=True, of_random_flip=True),
)


# ------------------------------------------------------------------------------ the recorded choice
#: Columns of the counter array. ``near_tie`` differs, but within the float bound of a tie.
EQUAL, NEAR_TIE, BEYOND = range(3)

#: Disagreeing tokens that are listed, the first ones of the stream.
NUM_LISTED = 64


class _Agreement:
    def __init__(self, extent: Extent) -> None:
        self._counts = extent.zeros(3)
        self._token = np.empty(0, dtype=np.int64)
        self._margin = np.empty(0)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        matches, effective_margin = batch.matches_recording, batch.effective_margin
        assert matches is not None and effective_margin is not None
        is_near = batch.is_near_tie()
        outcomes = {EQUAL: matches, NEAR_TIE: ~matches & is_near, BEYOND: ~matches & ~is_near}
        for outcome, is_one in outcomes.items():
            self._counts[..., outcome] += batch.count_labels(len(self._counts), is_one)
        differing = np.flatnonzero(~matches)
        if len(differing):
            token, margin = on_host(batch.token[differing]), on_host(effective_margin[differing])
            self._token, self._margin = _first(
                np.append(self._token, token), np.append(self._margin, margin)
            )

    def state(self) -> State:
        return {"counts": self._counts, "token": self._token, "margin": self._margin}


def _first(token: np.ndarray, margin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(token, kind="stable")[:NUM_LISTED]
    return token[order], margin[order]


def _merge_agreement(first: State, second: State) -> State:
    token, margin = _first(
        np.append(first["token"], second["token"]), np.append(first["margin"], second["margin"])
    )
    return {"counts": first["counts"] + second["counts"], "token": token, "margin": margin}


#: Does the recorded choice agree with the choice recomputed here.
AGREEMENT = Reduction(
    name="agreement",
    needs=("matches_recording", "margin"),
    start=_Agreement,
    merge=_merge_agreement,
    select=SettledCounts.select,
    settle=SettledCounts.of,
    use=Use(of_random_router=False),
)


#: Columns of the counter array.
BOUNDED, AMBIGUOUS = range(2)


def _count_ambiguous(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    counts[..., BOUNDED] += batch.count_labels(len(counts))
    counts[..., AMBIGUOUS] += batch.count_labels(len(counts), batch.is_near_tie())


#: Tokens whose choice two correct float32 engines may make differently.
AMBIGUITY = counters(
    "ambiguity", ("margin", "float_bound", "input_norm"), lambda extent: (2,), _count_ambiguous
)


# ------------------------------------------------------------------------------------------ experts
def _count_experts(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    kernels["count_experts"](counts, batch.chosen, batch.population, batch.block)


#: Chosen slots by expert.
EXPERT_COUNTS = counters(
    "expert_counts", ("chosen",), lambda extent: (extent.num_experts,), _count_experts
)


def _by_block(
    settled: SettledCounts, population: int | None, without: int | None
) -> Int64[np.ndarray, "blocks experts"]:
    """Blocks side by side, without the one that is left out."""
    blocks = settled.blocks(population)
    return blocks if without is None else np.delete(blocks, without, axis=0)


#: Chosen slots by block of documents and expert.
EXPERT_COUNTS_BY_BLOCK = StateView("expert_counts_by_block", "expert_counts", _by_block)


def _by_domain(
    settled: SettledCounts, population: int | None, without: int | None
) -> Int64[np.ndarray, "populations experts"]:
    """All populations side by side; for a single population only its own row."""
    counts = settled.counts
    total = counts.sum(axis=1)
    if without is not None:
        total = total - counts[:, without]
    return total if population is None else total[population][None]


#: Chosen slots by population and expert.
EXPERT_COUNTS_BY_DOMAIN = StateView("expert_counts_by_domain", "expert_counts", _by_domain)


# -------------------------------------------------------------------------------------------- sizes
def _count_sizes(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    assert batch.num_chosen is not None
    np.add.at(counts, (batch.population, batch.block, batch.num_chosen), 1)


#: Tokens by the number of experts that they choose, where tokens choose different numbers.
SET_SIZES = counters(
    "set_sizes", ("num_chosen",), lambda extent: (1 + extent.num_experts,), _count_sizes
)


# -------------------------------------------------------------------------------------------- pairs
def _count_pairs(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    kernels["count_pairs"](counts, batch.chosen, batch.block)


#: A symmetric table: N_ij tokens chose both, N_ii those that chose i. Zeros for domains, for which
#: there is no room: a table for each would be hundreds of megabytes.
EXPERT_PAIRS = block_counters(
    "expert_pairs",
    ("chosen",),
    lambda extent: (extent.num_experts, extent.num_experts),
    _count_pairs,
    lambda upper: upper + np.triu(upper, 1).T,
)


# --------------------------------------------------------------------------------------- neighbours
def _leads(batch: TokenBatch) -> Bool[np.ndarray, "tokens"]:
    """Whether the next row is the next position of the same document.

    A pair counts only within one tile: batches are made of whole tiles, so how they are cut cannot
    change which pairs count. One pair in 1024 is lost.
    """
    q = batch
    assert q.document is not None and q.position is not None
    follows = (q.document[1:] == q.document[:-1]) & (q.document[1:] >= 0)
    follows &= q.position[1:] == q.position[:-1] + 1
    follows &= q.token[1:] // TILE == q.token[:-1] // TILE
    leads = np.zeros_like(q.token, dtype=bool)
    leads[:-1] = follows
    return leads


#: Last axis of the counters: pairs of tokens, experts in common, equal chosen sets.
PAIRS, SHARED, SAME_SET = range(3)


def _count_neighbours(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    leads, chosen = _leads(batch), batch.chosen
    shared = np.zeros_like(batch.token)
    shared[:-1] = kernels["num_shared"](chosen[:-1], chosen[1:])
    shared = np.where(leads, shared, 0)
    counts[..., PAIRS] += batch.count_labels(len(counts), leads)
    counts[..., SHARED] += batch.count_labels(len(counts), shared)
    sizes = (chosen >= 0).sum(axis=1)
    same = leads & (shared == sizes) & (shared == np.roll(sizes, -1))
    counts[..., SAME_SET] += batch.count_labels(len(counts), same)


#: How many experts a token shares with the next one of its document.
NEIGHBOURS = counters(
    "neighbours", ("chosen", "document", "position"), lambda extent: (3,), _count_neighbours
)


def _count_top1(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    leads, top1 = _leads(batch), batch.chosen[:, 0]
    column = np.where(top1 >= 0, top1 + np.int32(2), np.int32(-1))
    kernels["count_experts"](counts, column[:, None], batch.population, batch.block)
    repeated = leads & (top1 >= 0) & (top1 == np.roll(top1, -1))
    counts[..., 0] += batch.count_labels(len(counts), leads)
    counts[..., 1] += batch.count_labels(len(counts), repeated)


#: Last axis: pairs of neighbours, pairs with equal first choice, then tokens led by each expert.
#: A margin means that choices are in the order of their scores, which recorded ids need not be.
TOP1 = counters(
    "top1",
    ("chosen", "margin", "document", "position"),
    lambda extent: (2 + extent.num_experts,),
    _count_top1,
)
