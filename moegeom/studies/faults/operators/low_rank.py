"""A low-rank update of the rows, such as an adapter that only one side has merged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64, Int64
from moegeom.engine.choice import group_masked
from moegeom.geometry.low_rank_fit import fitted_update
from moegeom.studies.faults.choice_values import weights_of
from moegeom.studies.faults.operator import AS_STORED, Operator, Proposal, Site
from moegeom.variants.emulated import emulate

#: Tokens whose sets differ that it takes, and tokens of each half to which rows are fitted: for a
#: first look, and in full.
_LEAST, _FIRST, _FITTED = 64, 512, 2048

#: Cosine of the updates that both halves say at first sight, from which it is worth a full look.
_ALIKE = 0.2

#: Ranks that are tried; of few experts any update has a low rank.
_RANKS, _EXPERTS_PER_RANK = (1, 2, 4), 4

#: Share of the sets that differ which it has to mend, among tokens that it was not fitted to.
_MENDS = 0.3

#: What a search over so many directions may find that means nothing.
_BITS_PER_EXPERT = 10.0

#: Tokens that are routed again at once.
_AT_ONCE = 4096


def _updated(site: Site) -> Iterator[Proposal]:
    """Cross-fitted: the update of even documents predicts the odd ones, and conversely.

    So no token says anything of itself, and the many numbers of an update need not be paid for.
    """
    rule, experts = site.router.rule, len(site.matching)
    differs, k = site.differs, site.theirs.shape[1]
    is_known = rule.is_affine or rule.score == "sigmoid"
    if not site.has_inputs or not is_known or rule.logit_map is not None:
        return
    half = _halves(site)
    ranks = [rank for rank in _RANKS if rank * _EXPERTS_PER_RANK <= experts]
    if min(int((differs & own).sum()) for own in (half, ~half)) < _LEAST or not ranks:
        return
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, user_api="blas"):  # thin products: threads cost more than they give
        one, other = (
            _fitted(site, np.flatnonzero(own), ranks[-1], _FIRST) for own in (half, ~half)
        )
        if (one * other).sum() <= _ALIKE * np.linalg.norm(one) * np.linalg.norm(other):
            return
        foretold = {rank: _foretold(site, half, rank) for rank in ranks}
    emulated, by_rank = emulate(site.router, AS_STORED), {}
    for rank, logits in foretold.items():
        selection, _ = group_masked(rule, emulated.compared(logits), site.kernels)
        chosen = np.argpartition(-selection, k - 1, axis=1)[:, :k].astype(np.int32)
        is_met = site.kernels["same_set"](np.ascontiguousarray(chosen), site.theirs)
        by_rank[rank] = float(is_met[differs].mean()), logits, selection
    rank = max(by_rank, key=lambda rank: by_rank[rank][0])
    mends, logits, selection = by_rank[rank]
    if mends >= _MENDS:
        yield _proposal(site, rank, logits, selection)


LOW_RANK = Operator("low_rank", _updated)


def _proposal(
    site: Site,
    rank: int,
    logits: Float[np.ndarray, "tokens experts"],
    selection: Float[np.ndarray, "tokens experts"],
) -> Proposal:
    def scores(there: Site, rows: np.ndarray) -> np.ndarray:
        return selection[rows]

    def values(there: Site, rows: np.ndarray) -> np.ndarray:
        assert there.recorded is not None
        if there.recorded.is_logits:
            return logits[rows].astype(np.float64)
        with np.errstate(divide="ignore"):
            weights = weights_of(there.router, logits[rows], there.theirs[rows])
            return np.log(weights.astype(np.float64))

    return Proposal(
        f"low_rank_{rank}",
        f"rows with an update of rank {rank}, as of an adapter",
        "rows damaged",
        own_bits=_BITS_PER_EXPERT * rank * len(site.matching),
        scores=scores,
        values=values,
        moves_logits=True,
    )


def _halves(site: Site) -> Bool[np.ndarray, "tokens"]:
    """Every second document; of one document every second stretch of it."""
    document = np.unique(site.columns.document, return_inverse=True)[1].ravel()
    if document.max() > 0:
        return document % 2 == 1
    return np.arange(len(document)) // 64 % 2 == 1


def _foretold(
    site: Site, half: Bool[np.ndarray, "tokens"], rank: int
) -> Float[np.ndarray, "tokens experts"]:
    """Logits of all tokens, each with the update fitted to the other half."""
    values = site.values_at(site.number)
    logits = site.logits.copy()
    for own in (half, ~half):
        update = _fitted(site, np.flatnonzero(~own), rank, _FITTED)
        rows = np.flatnonzero(own)
        for start in range(0, len(rows), _AT_ONCE):
            some = rows[start : start + _AT_ONCE]
            seen = values(some)
            assert seen is not None
            logits[some] += (seen @ update.T.astype(np.float32)).astype(logits.dtype)
    return logits


def _fitted(
    site: Site, rows: Int64[np.ndarray, "rows"], rank: int, most: int
) -> Float64[np.ndarray, "experts hidden"]:
    """The update fitted to these tokens, as many with differing sets as with equal ones."""
    differs = site.differs[rows]
    some = np.sort(
        np.concatenate([_few(rows[differs], most // 2), _few(rows[~differs], most // 2)])
    )
    seen = site.values_at(site.number)(some)
    assert seen is not None
    logits = site.logits[some].astype(np.float64)
    slope = np.ones_like(logits)
    if not site.router.rule.is_affine:
        # of the rule's scores; in a softmax over all experts only their order counts
        chance = 1.0 / (1.0 + np.exp(-logits))
        slope = chance * (1.0 - chance)
    return fitted_update(
        seen.astype(np.float64),
        site.selection[some].astype(np.float64),
        slope,
        site.theirs[some],
        _told_changes(site, some),
        rank,
    )


def _told_changes(
    site: Site, rows: Int64[np.ndarray, "rows"]
) -> Float64[np.ndarray, "rows experts"] | None:
    """B's recorded values less A's, for the experts they are of; only where B recorded logits.

    Logarithms of sigmoids are no logits: of these the sets alone say what changed.
    """
    recorded = site.recorded
    if recorded is None:
        return None
    logits = site.logits[rows]
    of_each = recorded.of_each(site.router, logits)
    if not np.array_equal(of_each, logits):
        return None
    changes = np.full(logits.shape, np.nan)
    expert = recorded.experts(site.theirs[rows], logits.shape[1])
    apart = recorded.values[rows] - np.take_along_axis(of_each, expert, axis=1)
    np.put_along_axis(changes, expert, apart, axis=1)
    return changes


def _few(rows: Int64[np.ndarray, "rows"], most: int) -> Int64[np.ndarray, "some"]:
    return rows[:: max(1, -(-len(rows) // most))]
