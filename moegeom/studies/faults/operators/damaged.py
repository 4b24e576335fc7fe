"""Damaged rows: copied over each other, zeroed, negated, scaled, or with an update of low rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64, Int64
from moegeom.engine.choice import group_masked
from moegeom.engine.plan import one_blas_thread
from moegeom.geometry.low_rank_fit import fitted_rows, fitted_update
from moegeom.geometry.selection import SCORES, mapped_logits
from moegeom.geometry.set_code import boundary, chosen_mask
from moegeom.studies.faults.operator import AS_STORED, Proposal, Site, operator, routed, weights_of
from moegeom.variants.emulated import emulate

#: Tokens with other sets to which rows are fitted, at least and at most, and entries in all.
_LEAST, _FITTED, _CELLS = 64, 1024, 2**24

#: Noise scale in gaps between scores; where a distance in such scales no longer matters.
_SOFT, _FAR = 3.0, 6.0

#: Noise of the values beside sets: rows differ by much more.
_VALUE_NOISE = 2.0**-5

#: Share of its tokens in which the value of an expert is off where its row is another.
_MOSTLY = 0.75

#: Factors of a single row that are tried; 0 is a row of zeros.
_FACTORS = (0.0, -1.0, 0.25, 0.5, 2.0 / 3.0, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)

#: Bits for having searched all places.
_SEARCHED = 36.0

#: Bits by which another row has to fit better, beside naming it.
_BETTER = 20.0


@operator
def rows_exchanged(site: Site) -> Iterator[Proposal]:
    """Rows permuted so that each fits its expert's choices best, biases unchanged."""
    from scipy.optimize import linear_sum_assignment

    if not site.has_inputs:
        return
    experts = len(site.matching)
    cost = row_costs(site)
    own = np.arange(experts)
    has_bias = site.router.selection_bias is not None or site.router.logit_bias is not None
    best = cost.argmin(axis=1)
    is_other = cost[own, own] - cost[own, best] > _BETTER + math.log2(experts)
    place = np.where(is_other, best, own)
    if is_other.any() and len(np.unique(place)) < experts:
        number = int(is_other.sum())
        text = f"{number} of {experts} rows are copies of other rows"
        yield from _placed(site, "rows_copied", text, place)
        if has_bias:
            yield from _placed(site, "rows_copied_with_bias", f"{text}, biases too", place, True)
    # without a bias, rows in another order are experts with other numbers
    if has_bias:
        _, place = linear_sum_assignment(cost - _BETTER * np.eye(experts))
        if number := int((place != own).sum()):
            text = f"{number} of {experts} rows in another order, biases where they were"
            yield from _placed(site, "rows_in_other_order", text, place)


def _placed(
    site: Site, name: str, text: str, place: Int64[np.ndarray, "experts"], with_biases: bool = False
) -> Iterator[Proposal]:
    moved, router = int((place != np.arange(len(place))).sum()), site.router
    edited = dataclasses.replace(router, weight=router.weight[place])
    for kind in ("selection_bias", "logit_bias") if with_biases else ():
        if (bias := getattr(router, kind)) is not None:
            edited = dataclasses.replace(edited, **{kind: bias[place]})
    bits = _SEARCHED + moved * 2.0 * math.log2(len(place))
    yield from routed(site, name, text, "rows damaged", edited, own_bits=bits)


def row_costs(site: Site) -> Float64[np.ndarray, "experts rows"]:
    r"""Bits of the choices of expert i with row j and its own bias, given its own boundary.

    :math:`C_{ij} = \sum_t \log_2(1 + e^{\mp (s_i(z_{tj}) - \mu_t)/T})`, minus where B chose i,
    over tokens whose sets differ: they hold the fault.
    """
    rows = np.flatnonzero(site.differs)
    if len(rows) < _LEAST:
        rows = np.arange(len(site.theirs))
    experts = len(site.matching)
    most = max(_LEAST, min(_FITTED, _CELLS // experts**2))
    rows = rows[:: max(1, math.ceil(len(rows) / most))]
    middle, spacing = boundary(site.selection[rows], site.theirs.shape[1])
    is_chosen = chosen_mask(site.theirs[rows], experts)
    rule, bias = site.router.rule, site.router.selection_bias
    mapped = mapped_logits(site.logits[rows], rule.logit_map)
    if not rule.is_affine:
        mapped = SCORES[rule.score](mapped)
    own = site.router.logit_bias if rule.is_affine else None
    if own is not None:  # rows without their biases
        mapped = mapped - own
    scale = np.float32(_SOFT * spacing)
    cost = np.empty((experts, experts))
    for expert in range(experts):
        shift = 0.0 if bias is None else float(bias[expert])
        shift += 0.0 if own is None else float(own[expert])
        apart = (mapped + np.float32(shift) - middle[:, None]).astype(np.float32) / scale
        signed = np.where(is_chosen[:, expert, None], -apart, apart)
        cost[expert] = np.log1p(np.exp(np.clip(signed, -_FAR, _FAR))).sum(axis=0)
    return cost / math.log(2.0) + _value_costs(site, rows)


def _value_costs(
    site: Site, rows: Int64[np.ndarray, "rows"]
) -> Float64[np.ndarray, "experts others"]:
    """Bits of B's values of expert i with row j and its own bias, given those of the others.

    0 where it recorded none.
    """
    recorded, experts = site.recorded, len(site.matching)
    cost = np.zeros((experts, experts))
    if recorded is None:
        return cost
    logits = site.logits[rows]
    own = site.router.logit_bias
    bias = np.zeros(experts) if own is None else own.astype(np.float64)
    plain = logits - bias.astype(logits.dtype)
    expert = recorded.experts(site.theirs[rows], experts)
    apart = recorded.values[rows] - np.take_along_axis(
        recorded.of_each(site.router, logits), expert, axis=1
    )
    is_finite = np.isfinite(apart).all(axis=1)
    expert, apart, plain, values = (
        of[is_finite] for of in (expert, apart, plain, recorded.values[rows])
    )
    far = np.abs(apart - np.median(apart, axis=1, keepdims=True)) > _VALUE_NOISE
    often = np.bincount(expert.ravel(), far.ravel(), experts)
    is_wrong = often > _MOSTLY * np.bincount(expert.ravel(), minlength=experts)
    for number in range(experts):
        there, slot = np.nonzero(expert == number)
        # the others of the token with right values say what is common to all of it
        is_other = np.arange(expert.shape[1]) != slot[:, None]
        is_right = is_other & ~is_wrong[expert[there]]
        there, slot = there[is_right.any(axis=1)], slot[is_right.any(axis=1)]
        if not len(there):
            continue
        is_right = is_right[is_right.any(axis=1)]
        usual = np.nanmedian(np.where(is_right, apart[there], np.nan), axis=1)
        predicted = recorded.of_each(site.router, plain[there] + bias[number].astype(logits.dtype))
        off = values[there, slot] - usual
        bits = np.log2(1.0 + ((off[:, None] - predicted) / _VALUE_NOISE) ** 2)
        cost[number] = np.nan_to_num(bits).sum(axis=0)
    return cost


@operator
def rows_scaled(site: Site) -> Iterator[Proposal]:
    """All rows times one factor: of some experts only, where the choices of the others say so."""
    for factor in _FACTORS:
        rows = site.router.weight * site.router.weight.dtype.type(factor)
        edited = dataclasses.replace(site.router, weight=rows)
        words = {0.0: "rows of zeros", -1.0: "rows turned round"}
        text = words.get(factor, f"rows times {factor:.3g}")
        name = f"rows_times_{factor:.3g}"
        for one in routed(site, name, text, "rows damaged", edited, bits=4.0):
            # zeros for all leave nothing to choose by
            yield dataclasses.replace(one, of_some_only=factor == 0.0)


#: Share of what differs in values that other rows have to foretell, from so many tokens for each
#: number of a row on.
_LINEAR, _TOLD_BY = 0.9, 8

#: Tokens of each half to which an update is fitted: for a first look, and in full.
_FIRST, _IN_FULL = 512, 2048

#: Cosine of the updates that both halves say at first sight, from which it is worth a full look.
_ALIKE = 0.2

#: Ranks that are tried; of few experts any update has a low rank.
_RANKS, _EXPERTS_PER_RANK = (1, 2, 4), 4

#: Share of the sets that differ from which rows of any rank are tried.
_MANY = 0.1

#: Share of what the best rank mends from which a smaller one is taken.
_AS_WELL = 0.9

#: Share of the sets that differ which it has to mend, among tokens that it was not fitted to.
_MENDS = 0.3

#: What a search over so many directions may find that means nothing.
_BITS_PER_EXPERT = 10.0

#: Tokens that are routed again at once.
_AT_ONCE = 4096


@operator
def low_rank(site: Site) -> Iterator[Proposal]:
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
    looks = [ranks[-1]]
    if site.differs.mean() > _MANY:
        ranks.append(experts)
        looks.append(experts)

    def is_alike(rank: int) -> bool:
        one, other = (_fitted(site, np.flatnonzero(own), rank, _FIRST) for own in (half, ~half))
        return bool(_are_alike(one, other).any())

    with one_blas_thread():  # thin products: threads cost more than they give
        if not any(is_alike(rank) for rank in looks):
            return
        foretold = {rank: _foretold(site, half, rank) for rank in ranks}
    emulated, by_rank = emulate(site.router, AS_STORED), {}
    for rank, logits in foretold.items():
        selection, _ = group_masked(rule, emulated.compared(logits), site.kernels)
        chosen = np.argpartition(-selection, k - 1, axis=1)[:, :k].astype(np.int32)
        is_met = site.kernels["same_set"](np.ascontiguousarray(chosen), site.theirs)
        by_rank[rank] = float(is_met[differs].mean()), logits, selection
    most = max(mends for mends, _, _ in by_rank.values())
    # the smallest that does nearly as well: more numbers follow noise as well
    rank = next(rank for rank in ranks if by_rank[rank][0] >= _AS_WELL * most)
    mends, logits, selection = by_rank[rank]

    def values(there: Site, rows: np.ndarray) -> np.ndarray:
        assert there.recorded is not None
        if there.recorded.is_logits:
            return logits[rows].astype(np.float64)
        with np.errstate(divide="ignore"):
            weights = weights_of(there.router, logits[rows], there.theirs[rows])
            return np.log(weights.astype(np.float64))

    if rank == experts and not _is_linear(site, half, logits):
        return
    if mends >= _MENDS:
        is_full = rank == experts
        text = f"rows with an update of rank {rank}, as of an adapter"
        yield Proposal(
            "other_rows" if is_full else f"low_rank_{rank}",
            "other rows, of which half of B's choices foretell the rest" if is_full else text,
            "rows damaged",
            own_bits=_BITS_PER_EXPERT * experts * (1 if is_full else rank),
            scores=lambda there, rows: selection[rows],
            values=values,
            moves_logits=True,
            is_estimate=True,
        )


def foretold_share(site: Site) -> float | None:
    """The share of what differs in B's recorded values that other rows foretell, fitted to half of
    the tokens; None where it recorded none, or no inputs are at hand.

    Nearly all of it where rows differ, and less where what they read does.
    """
    if not site.has_inputs or site.recorded is None or len(site.theirs) < 2 * _LEAST:
        return None
    return _share_of_values(site, _foretold(site, _halves(site), len(site.matching)))


def _share_of_values(site: Site, foretold: Float[np.ndarray, "tokens experts"]) -> float | None:
    """The share of what differs in B's recorded values that these logits give."""
    recorded, sizes = site.recorded, []
    if recorded is None:
        return None
    finite = np.isfinite(recorded.values).all(axis=1)
    for logits in (site.logits, foretold):
        apart = recorded.apart(site.router, site.place, logits, site.theirs)
        sizes.append(float((apart[finite] ** 2).sum()))
    return 1.0 - sizes[1] / sizes[0] if sizes[0] > 0.0 else None


def _is_linear(
    site: Site, half: Bool[np.ndarray, "tokens"], foretold: Float[np.ndarray, "tokens experts"]
) -> bool:
    """Whether values are those of other rows, as far as so many tokens can tell."""
    fewest = min(int(half.sum()), int((~half).sum()), _IN_FULL)
    share = _share_of_values(site, foretold)
    return share is None or share >= _LINEAR or fewest < _TOLD_BY * site.router.hidden_size


def _halves(site: Site) -> Bool[np.ndarray, "tokens"]:
    """Every second document; of one document every second stretch of it."""
    document = site.document
    if document.max() > 0:
        return document % 2 == 1
    return np.arange(len(document)) // 64 % 2 == 1


def _foretold(
    site: Site, half: Bool[np.ndarray, "tokens"], rank: int
) -> Float[np.ndarray, "tokens experts"]:
    """Logits of all tokens, each with the update fitted to the other half."""
    values = site.values_at(site.number)
    logits = site.logits.copy()
    updates = [_fitted(site, np.flatnonzero(~own), rank, _IN_FULL) for own in (half, ~half)]
    if rank == logits.shape[1]:
        is_changed = _are_alike(*updates, axis=1)
        updates = [np.where(is_changed[:, None], update, 0.0) for update in updates]
    for own, update in zip((half, ~half), updates, strict=True):
        rows = np.flatnonzero(own)
        for start in range(0, len(rows), _AT_ONCE):
            some = rows[start : start + _AT_ONCE]
            seen = values(some)
            assert seen is not None
            logits[some] += (seen @ update.T.astype(np.float32)).astype(logits.dtype)
    return logits


def _are_alike(
    one: Float64[np.ndarray, "experts hidden"],
    other: Float64[np.ndarray, "experts hidden"],
    axis: int | None = None,
) -> Bool[np.ndarray, "..."]:
    """Whether two updates say the same, of each expert or in all."""
    sizes = np.linalg.norm(one, axis=axis) * np.linalg.norm(other, axis=axis)
    return np.asarray((one * other).sum(axis=axis) > _ALIKE * sizes)


def _fitted(
    site: Site, rows: Int64[np.ndarray, "rows"], rank: int, most: int
) -> Float64[np.ndarray, "experts hidden"]:
    """The update fitted to these tokens, as many with differing sets as with equal ones."""
    differs = site.differs[rows]
    halves = (rows[differs], rows[~differs])
    every = (max(1, math.ceil(len(half) / (most // 2))) for half in halves)
    some = np.sort(np.concatenate([half[::n] for half, n in zip(halves, every, strict=True)]))
    seen = site.values_at(site.number)(some)
    assert seen is not None
    choices = site.choices_of(some, with_values=True)
    if rank < len(site.matching):
        return fitted_update(seen, choices, rank)
    update = fitted_rows(seen, choices)
    # a softmax does not tell one changed row from all others changed the other way
    return update - np.median(update, axis=0) if site.router.rule.is_affine else update
