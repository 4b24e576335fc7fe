"""Damaged rows: copied over each other, zeroed, negated, or scaled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Float64, Int64
from moegeom.geometry.selection import SCORES, mapped_logits
from moegeom.geometry.set_code import boundary, chosen_mask
from moegeom.studies.faults.operator import Operator, Proposal, Site, routed

#: Tokens to which rows are fitted, at least and at most, and entries that are looked at.
_LEAST, _FITTED, _CELLS = 64, 1024, 2**24

#: Noise scale in gaps between scores; where a distance in such scales no longer matters.
_SOFT, _FAR = 3.0, 6.0

#: Noise of what is told beside sets: rows differ by much more.
_TOLD = 2.0**-5

#: Share of its tokens in which what is told of an expert is off where its row is another.
_MOSTLY = 0.75

#: Factors of a single row that are tried; 0 is a row of zeros.
_FACTORS = (0.0, -1.0, 0.25, 0.5, 2.0 / 3.0, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)

#: Bits for having searched all places.
_SEARCHED = 36.0

#: Bits by which another row has to fit better, beside naming it.
_BETTER = 20.0


def _exchanged(site: Site) -> Iterator[Proposal]:
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
    site: Site,
    name: str,
    text: str,
    place: Int64[np.ndarray, "experts"],
    with_biases: bool = False,
) -> Iterator[Proposal]:
    moved, router = int((place != np.arange(len(place))).sum()), site.router
    edited = dataclasses.replace(router, weight=router.weight[place])
    for kind in ("selection_bias", "logit_bias") if with_biases else ():
        if (bias := getattr(router, kind)) is not None:
            edited = dataclasses.replace(edited, **{kind: bias[place]})
    bits = _SEARCHED + moved * 2.0 * math.log2(len(place))
    yield from routed(site, name, text, "rows damaged", edited, own_bits=bits)


EXCHANGED = Operator("rows_exchanged", _exchanged)


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
    return cost / math.log(2.0) + _told_costs(site, rows)


def _told_costs(
    site: Site, rows: Int64[np.ndarray, "rows"]
) -> Float64[np.ndarray, "experts others"]:
    """Bits of B's values of expert i with row j and its own bias, given those of the others.

    0 where it told nothing.
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
        expert[is_finite],
        apart[is_finite],
        plain[is_finite],
        recorded.values[rows][is_finite],
    )
    far = np.abs(apart - np.median(apart, axis=1, keepdims=True)) > _TOLD
    often = np.bincount(expert.ravel(), far.ravel(), experts)
    is_wrong = often > _MOSTLY * np.bincount(expert.ravel(), minlength=experts)
    for number in range(experts):
        there, slot = np.nonzero(expert == number)
        # the others of the token that are told rightly say what is common to all of it
        is_other = np.arange(expert.shape[1]) != slot[:, None]
        is_right = is_other & ~is_wrong[expert[there]]
        there, slot = there[is_right.any(axis=1)], slot[is_right.any(axis=1)]
        if not len(there):
            continue
        is_right = is_right[is_right.any(axis=1)]
        usual = np.nanmedian(np.where(is_right, apart[there], np.nan), axis=1)
        predicted = recorded.of_each(site.router, plain[there] + bias[number].astype(logits.dtype))
        off = values[there, slot] - usual
        bits = np.log2(1.0 + ((off[:, None] - predicted) / _TOLD) ** 2)
        cost[number] = np.nan_to_num(bits).sum(axis=0)
    return cost


def _scaled(site: Site) -> Iterator[Proposal]:
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


SCALED = Operator("rows_scaled", _scaled)


def _transposed(site: Site) -> Iterator[Proposal]:
    experts, hidden = site.router.weight.shape
    if experts != hidden:
        flat = np.ascontiguousarray(site.router.weight).reshape(hidden, experts).T
        text = "rows read as columns (shapes exchanged)"
    else:
        flat, text = site.router.weight.T, "rows read as columns"
    edited = dataclasses.replace(site.router, weight=np.ascontiguousarray(flat))
    yield from routed(site, "transposed", text, "rows damaged", edited)


TRANSPOSED = Operator("transposed", _transposed)
