"""Which experts some input can reach, and which none can: with a proof, or left open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from moegeom.core.router import GroupMask, Rule
from moegeom.core.shapes import Bool, Float, Float64, Int64
from moegeom.geometry.gram import RANK_TOLERANCE, EffectiveRows
from moegeom.geometry.selection import (
    SCORES,
    group_margin,
    group_mask,
    mapped_logits,
    selection_scores,
)

#: Relative distance that a comparison must keep to count as proved in float64.
_CLEAR = 1e-9

#: Squared length of a difference, relative to what is subtracted, that a Gram matrix resolves.
_RESOLVED = 1e-4

#: Lengths of the points that are tried, in units of the radius: scores saturate far out.
_LENGTHS = (1.0, 0.3, 0.1)


class Proof(StrEnum):
    """How an expert was decided."""

    point = "point"
    independence = "affine independence"
    beaten = "beaten everywhere"
    open = "open"


@dataclass(frozen=True, eq=False)
class Reachability:
    """For each expert a proof, and the experts that beat it wherever the input lies.

    An expert is reachable when an input in the ball has it in the chosen set with a clear margin
    (``point``), or when the rows are affinely independent and there is no bias, so that every
    order of the logits occurs in every neighbourhood of 0 (``independence``). It is unreachable
    when at least k others (of its own group, with groups) beat it on the whole ball; those are in
    ``beaten_by``, the certificate. ``is_certain`` marks experts that no input leaves out: they beat
    all but k - 1 others on the whole ball (not told of a rule with groups, nor for k = E).
    """

    proofs: tuple[Proof, ...]
    beaten_by: tuple[Int64[np.ndarray, "_"], ...]
    is_certain: Bool[np.ndarray, "experts"]


def reachability(
    rows: EffectiveRows,
    rule: Rule,
    radius: float,
    logit_bias: Float[np.ndarray, "experts"] | None = None,
    selection_bias: Float[np.ndarray, "experts"] | None = None,
) -> Reachability:
    r"""What can be proved about each expert on the ball :math:`|x| \le R` of normed inputs.

    ``radius`` is :math:`\sqrt{D}` behind an RMS norm (a layer norm reaches a part of the ball, so
    only ``beaten`` is certain there) and inf without a norm. All open when a row is not finite.
    A point inside the ball stands for one on its sphere with the same logits, which exists when
    there are fewer experts than dimensions; with more experts only the sphere is tried.

    Beaten: for an affine rule expert j beats i on the ball when
    :math:`b_j - b_i > R |w_j - w_i|`; for increasing scores when
    :math:`s(l_j) + c_j > s(h_i) + c_i` with l, h the least and largest logit on the ball, behind
    the rule's map of logits.
    With groups i and j share one, and nobody is beaten where a fill could overtake an expert that
    is kept. All open when a bias is not finite.
    Oracle in tests: linear programs, and random inputs.
    """
    experts = len(rows.finite)
    nothing = tuple(np.empty(0, np.int64) for _ in range(experts))
    if not _is_decidable(rows, logit_bias, selection_bias):
        return Reachability((Proof.open,) * experts, nothing, np.zeros(experts, dtype=bool))
    offset = np.zeros(experts) if logit_bias is None else logit_bias.astype(np.float64)
    has_point = _by_point(rows, rule, radius, offset, selection_bias)
    beats = _beats(rows, rule, radius, offset, selection_bias)
    independent = _are_independent(rows, rule, offset, selection_bias)
    proofs, lists = [], []
    for expert in range(experts):
        others = np.flatnonzero(beats[:, expert])
        lists.append(others)
        if len(others) >= rule.top_k:
            proofs.append(Proof.beaten)
        elif has_point[expert]:
            proofs.append(Proof.point)
        else:
            proofs.append(Proof.independence if independent else Proof.open)
    return Reachability(tuple(proofs), tuple(lists), _is_certain(beats, rule))


def _is_certain(
    beats: Bool[np.ndarray, "experts experts"], rule: Rule
) -> Bool[np.ndarray, "experts"]:
    if rule.groups is not None or rule.top_k == len(beats):
        return np.zeros(len(beats), dtype=bool)
    return beats.sum(axis=1) >= len(beats) - rule.top_k


def num_decided(
    rows: EffectiveRows,
    rule: Rule,
    radius: float,
    logit_bias: Float[np.ndarray, "experts"] | None = None,
    selection_bias: Float[np.ndarray, "experts"] | None = None,
) -> tuple[int, int]:
    """Experts that are beaten, and that are certain, as in :func:`reachability`, without points."""
    if not _is_decidable(rows, logit_bias, selection_bias):
        return 0, 0
    offset = np.zeros(len(rows.finite)) if logit_bias is None else logit_bias.astype(np.float64)
    beats = _beats(rows, rule, radius, offset, selection_bias)
    return int((beats.sum(axis=0) >= rule.top_k).sum()), int(_is_certain(beats, rule).sum())


def _is_decidable(rows: EffectiveRows, *biases: Float[np.ndarray, "experts"] | None) -> bool:
    finite = all(bias is None or bool(np.isfinite(bias).all()) for bias in biases)
    return finite and bool(rows.finite.all())


def _are_independent(
    rows: EffectiveRows,
    rule: Rule,
    offset: Float64[np.ndarray, "experts"],
    selection_bias: Float[np.ndarray, "experts"] | None,
) -> bool:
    if not rule.is_affine or offset.any() or selection_bias is not None:
        return False
    values = np.linalg.eigvalsh(rows.gram)[::-1]
    # the centred rows sum to zero: rank E - 1 is full
    return bool(values[0] > 0.0 and values[-2] > (RANK_TOLERANCE**2) * values[0])


def _beats(
    rows: EffectiveRows,
    rule: Rule,
    radius: float,
    offset: Float64[np.ndarray, "experts"],
    selection_bias: Float[np.ndarray, "experts"] | None,
) -> Bool[np.ndarray, "experts experts"]:
    """``beats[j, i]``: j is before i for every input of the ball."""
    experts = len(offset)
    bias = np.zeros(experts) if selection_bias is None else selection_bias.astype(np.float64)
    if rule.is_affine:
        total = offset + bias
        reach = _reach(radius, _distances(rows)) * (1.0 + _CLEAR)
        ahead = total[:, None] - total[None, :]
        beats = ahead > reach + _CLEAR * (np.abs(total)[:, None] + np.abs(total)[None, :])
    else:
        least, largest = _score_ranges(rows, rule, radius, offset)
        ahead = (least + bias)[:, None] - (largest + bias)[None, :]
        size = np.maximum(np.abs(least)[:, None], np.abs(largest)[None, :])
        beats = ahead > _CLEAR * (1.0 + np.abs(bias).max() + size)
        if rule.groups is not None:
            group = np.arange(experts) // (experts // rule.groups.num_groups)
            # a group that is kept is kept whole; experts of other groups may be masked
            beats &= group[:, None] == group[None, :]
            beats &= _is_fill_last(least + bias, rule.groups, rule.top_k)
    return beats


def _reach(radius: float, lengths: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Largest product with a vector of the ball; 0 for a zero row even without a radius."""
    with np.errstate(invalid="ignore"):  # inf * 0
        return np.where(lengths > 0.0, radius * lengths, 0.0)


def _distances(rows: EffectiveRows) -> Float64[np.ndarray, "experts experts"]:
    """Distances between rows; 0 for equal rows only."""
    sums = rows.squared_norms[:, None] + rows.squared_norms[None, :]
    squares = np.maximum(sums - 2.0 * rows.gram, 0.0)
    apart = np.sqrt(squares)
    near = squares < _RESOLVED * sums
    for row in np.flatnonzero(near.sum(axis=1) > 1):
        # what is left of nearly equal numbers is rounding: measure the difference itself
        others = np.flatnonzero(near[row])
        apart[row, others] = np.linalg.norm(rows.centred[others] - rows.centred[row], axis=1)
    return apart


def _is_fill_last(least: Float64[np.ndarray, "experts"], groups: GroupMask, top_k: int) -> bool:
    """Whichever groups are kept, k of their experts are above the fill for every input."""
    above = (least > groups.fill + _CLEAR).reshape(groups.num_groups, -1).sum(axis=1)
    return bool(np.sort(above)[: groups.num_kept].sum() >= top_k)


def _score_ranges(
    rows: EffectiveRows, rule: Rule, radius: float, offset: Float64[np.ndarray, "experts"]
) -> tuple[Float64[np.ndarray, "experts"], Float64[np.ndarray, "experts"]]:
    """Least and largest score of each expert on the ball, behind the map of the logits."""
    if rule.score == "softmax":
        return np.zeros(len(offset)), np.ones(len(offset))
    reach = _reach(radius, rows.lengths)
    # the map and the score are increasing: the ends of the logits give the ends of the scores
    ends = mapped_logits(np.stack([offset - reach, offset + reach]), rule.logit_map)
    least, largest = SCORES[rule.score](ends)
    return least, largest


def _by_point(
    rows: EffectiveRows,
    rule: Rule,
    radius: float,
    offset: Float64[np.ndarray, "experts"],
    selection_bias: Float[np.ndarray, "experts"] | None,
) -> Bool[np.ndarray, "experts"]:
    """Experts that one of a few likely points has in the chosen set, clear of the next one."""
    experts, hidden = rows.centred.shape
    reached = np.full(experts, rule.top_k == experts)
    far = (1.0 - _CLEAR) * radius if np.isfinite(radius) else float(np.sqrt(hidden))
    lengths = _LENGTHS if experts < hidden else _LENGTHS[:1]
    common = rows.centred @ rows.mean
    own = np.arange(experts)
    for partner in _partners(experts, rule):
        if reached.all():
            break
        # sums of the row of each expert and that of its partner, along with their own mean
        products, along, sizes = rows.gram, common, rows.squared_norms
        if partner is not None:
            products, along, sizes = (
                values + values[partner] for values in (products, along, sizes)
            )
        squares = products[own, own]
        if partner is not None:
            squares = squares + products[own, partner]
        # rows that cancel leave rounding, which is no direction
        clear = squares > _RESOLVED * sizes
        if not clear.any():
            continue
        # W x = C x + m . x for x = unit combinations of the centred rows
        logits = (products + along[:, None])[clear] / np.sqrt(squares[clear, None])
        for length in lengths:
            if not reached.all():
                reached |= _chosen(length * far * logits + offset, rule, selection_bias)
    return reached


def _partners(experts: int, rule: Rule) -> Iterator[Int64[np.ndarray, "experts"] | None]:
    """Whose row is taken along to walk along that of each expert: first nobody's, then others of
    its group, which is ranked by its two best experts.
    """
    yield None
    if rule.groups is not None:
        size, own = experts // rule.groups.num_groups, np.arange(experts)
        for step in range(1, size):
            yield own // size * size + (own + step) % size


def _chosen(
    logits: Float64[np.ndarray, "points experts"],
    rule: Rule,
    selection_bias: Float[np.ndarray, "experts"] | None,
) -> Bool[np.ndarray, "experts"]:
    scores = selection_scores(logits, rule, selection_bias)
    if rule.groups is not None:
        clear = group_margin(scores, rule.groups) > _CLEAR * (1.0 + np.abs(scores).max(axis=1))
        scores = group_mask(scores[clear], rule.groups)
    if rule.top_k == scores.shape[1]:
        return np.ones(scores.shape[1], dtype=bool)
    following = -np.partition(-scores, rule.top_k, axis=1)[:, [rule.top_k]]
    with np.errstate(invalid="ignore"):  # -inf - -inf among masked experts
        ahead = scores - following > _CLEAR * (1.0 + np.abs(following))
    ahead |= np.isneginf(following) & np.isfinite(scores)
    return np.asarray(ahead.any(axis=0))
