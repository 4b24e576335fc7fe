"""All rows times a number, a factor for each column, the gain, a rotation; updates of low rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np

from moegeom.core.router import Router, Rule
from moegeom.core.shapes import Float64
from moegeom.core.text import percent
from moegeom.geometry.description import low_rank_part, number_bits
from moegeom.geometry.rows import (
    LEAST_ROWS_FOR_GRAM,
    column_factors,
    common_factor,
    gram_noise,
    size,
    spread_factor,
    usual_factor,
)
from moegeom.router.edits import RouterInModel, Subject, edits_of
from moegeom.studies.changes.edit import (
    Edit,
    EditFit,
    Exported,
    Judgement,
    always,
    error,
    error_if_exact,
)
from moegeom.studies.changes.record import Change
from moegeom.studies.changes.row_pair import EQUAL, RowPair, effective_rows_of, share

#: With fewer rows a factor for each column explains much by chance.
_LEAST_ROWS_FOR_COLUMNS = 4


#: Columns whose factor is this far from 1 are scaled.
_OTHER_FACTOR = 0.1


def _common(pair: RowPair, sign: float) -> Iterator[EditFit]:
    same = not pair.is_projected and np.array_equal(
        pair.routers[0].weight[pair.place], pair.routers[1].weight
    )
    spread = sign * spread_factor(pair.a, pair.b)
    factors = [common_factor(*pair.centred), usual_factor(pair.a, pair.b), spread]
    factors = [factor for factor in factors if factor * sign > 0.0]
    if len(pair.a) >= _LEAST_ROWS_FOR_COLUMNS and pair.b.any():
        # of those columns alone that another factor than 1 fits
        of_columns = column_factors(pair.a, pair.b)
        others = of_columns[np.abs(of_columns - 1.0) > _OTHER_FACTOR]
        other = float(np.median(others)) if len(others) else 1.0
        factors += [other] * (other * sign > 0.0 or (other == 0.0 and sign > 0.0))
    for factor in factors:
        rows = factor * pair.a
        finest = max(size(pair.left_of(rows)), float(pair.finest.max()))
        yield EditFit(
            rows,
            number_bits(1, pair.a.size, size(pair.left), finest),
            kind="" if round(factor, 3) == -1.0 else f"by {abs(factor):.3g}",
            detail="by the gain; the weight is bit for bit the same" if same else "",
            evidence={"factor": factor},
            steps=max(1.0, abs(factor)),
            allows_subset=True,
        )


def _scaled_meaning(rule: Rule) -> str:
    if rule.is_affine and not rule.has_logit_bias and not rule.has_selection_bias:
        return "a common factor changes no choice; routing weights change with it (temperature)."
    return "beside a bias, or with groups, a common factor changes choices."


#: What a factor of some rows or columns means, whatever the rule.
_OF_SOME = "these rows or columns count otherwise beside the others: choices change."

SCALED = Edit(
    "scaled",
    "scaled {kind}",
    _scaled_meaning,
    fit=lambda pair: _common(pair, 1.0),
    gate=error_if_exact,
    of_some=_OF_SOME,
)

NEGATED = Edit(
    "negated",
    "negated {kind}",
    "every preference is turned round.",
    fit=lambda pair: _common(pair, -1.0),
    gate=lambda change: "error",
)


def _columns(pair: RowPair) -> Iterator[EditFit]:
    a, b = pair.centred
    if pair.is_projected or len(a) < _LEAST_ROWS_FOR_COLUMNS or not (a.any() and b.any()):
        return
    factors = column_factors(a, b)
    rows = pair.a * factors
    left = size(pair.left_of(rows))
    # without a common shift the rows with their means tell the factors better
    whole = pair.a * column_factors(pair.a, pair.b)
    left_of_whole = size(pair.b - whole)
    if left_of_whole <= 2.0 * left + float(pair.finest.max()):
        rows, factors, left = whole, column_factors(pair.a, pair.b), left_of_whole
    low, high = np.percentile(factors, [5, 95]).tolist()
    finest = max(left, float(pair.finest.max()))
    yield EditFit(
        rows,
        number_bits(len(factors), pair.a.size, size(pair.left), finest),
        detail=f"factors {low:.3g} to {high:.3g} (5 % to 95 % of the columns)",
        size=pair.change_size,
        evidence={"low": low, "high": high},
    )


COLUMNS_SCALED = Edit(
    "columns scaled",
    "columns scaled, rows moved by {size}",
    "the effective router weighs its inputs differently: choices change.",
    fit=_columns,
)


#: A fold leaves less than this of the distance that the weight alone would have made.
_EXPLAINS = 0.5


def _gains(pair: RowPair) -> tuple[Float64[np.ndarray, "hidden"], Float64[np.ndarray, "hidden"]]:
    first, second = (
        np.ones(r.hidden_size) if r.gain is None else r.gain.astype(np.float64)
        for r in pair.routers
    )
    return first, second


def _has_other_gain(pair: RowPair) -> bool:
    if pair.is_projected or not pair.is_stored:
        return False
    first, second = _gains(pair)
    return not np.array_equal(first, second)


def _folded(pair: RowPair) -> Iterator[EditFit]:
    if FOLDED.name in pair.named or not _has_other_gain(pair):
        return
    first, second = pair.routers
    before = first.weight[pair.place]
    if np.array_equal(before, second.weight):
        return
    distance, length = size(pair.left), size(pair.centred[1])
    alike = min(_without_fold(before, first, second), pair.length, length)
    if distance > _EXPLAINS * alike:
        return
    finest = max(distance, float(pair.finest.max()), EQUAL * length)
    saved = pair.a.size * np.log2(max(alike / finest, 1.0))
    yield EditFit(
        pair.a,
        number_bits(pair.a.shape[1], pair.a.size, 1.0, 1.0),
        evidence={"effective_change": share(distance, pair.length)},
        saved=float(saved),
    )


def _without_fold(before: np.ndarray, first: Router, second: Router) -> float:
    """Distance of the centred rows for B's weight behind A's gain."""
    gain = 1.0 if first.gain is None else first.gain.astype(np.float64)
    moved = (second.weight.astype(np.float64) - before) * gain
    return size(moved - moved.mean(axis=0))


def _judge_folded(change: Change, pair: Exported) -> Judgement:
    moved, allowed = pair.moved(), pair.own_rounding()
    begin = "gain and columns changed inversely"
    if moved <= allowed:
        rounding = f"a rounding of {percent(moved)} (A's own precision: {percent(allowed)})"
        others = "" if pair.experts_followed else "; experts must have been folded too"
        return Judgement("passed", f"{begin}, W diag(g) is the same up to {rounding}{others}.")
    return Judgement(
        "failed",
        f"{begin}, and W diag(g) moved by {percent(moved)}; writing it again in A's own precision "
        f"leaves at most {percent(allowed)}: digits were lost.",
    )


FOLDED = Edit(
    "gain folded",
    "gain folded",
    "the gain of the norm and the columns of the router changed inversely, W diag(g) is the "
    "same within rounding: no choice changes, if what else reads that norm, as experts do, was "
    "folded too.",
    _judge_folded,
    _folded,
)

NOT_IN_EXPERTS = Edit(
    "not folded into experts",
    "not folded into experts {kind}",
    "first matrices of experts read the norm whose gain changed, and did not follow: what they "
    "make of each token is another, and all later layers read that.",
)


def _not_followed(pair: RowPair) -> Iterator[EditFit]:
    if not _has_other_gain(pair):
        return
    first, second = _gains(pair)
    routers = pair.routers
    weight = routers[0].weight[pair.place].astype(np.float64)
    same = np.array_equal(weight, routers[1].weight)
    moved = f"rows W diag(g) moved by {percent(pair.change_size)}"
    changed = share(float(np.linalg.norm(second - first)), float(np.linalg.norm(first)))
    if same:
        yield EditFit(
            pair.b,
            number_bits(2, pair.a.size, size(pair.left), float(pair.finest.max())),
            kind="weight the same, gain changed",
            detail=f"the gain changed by {percent(changed)}; {moved}",
            size=pair.change_size,
            evidence={"gain_change": changed},
        )


NOT_FOLLOWED = Edit(
    "gain not followed",
    "{kind}, rows moved by {size}",
    "the gain in front changed and the weight did not follow: choices change. Smoothing that "
    "forgets the router does so, and training with a frozen one.",
    fit=_not_followed,
)


# ------------------------------------------------------------------------------- edits of the list
#: Rows on which an edit is tried first; there it leaves no more than this share of the change.
_FIRST_ROWS, _FIRST_SHARE = 8, 0.7


def _of_list(*subjects: Subject) -> Callable[[RowPair], Iterator[EditFit]]:
    """Fits of the edits that can be told without looking at B."""

    def fits(pair: RowPair) -> Iterator[EditFit]:
        if pair.is_projected or not pair.is_stored or pair.is_settled:
            return
        first = pair.routers[0]
        routers = () if pair.others is None else pair.others.routers
        number = next((n for n, one in enumerate(routers) if one.name == first.name), 0)
        few = slice(None, None, max(1, len(pair.place) // _FIRST_ROWS))
        some, then, now = pair.place[few], pair.a[few], pair.b[few]
        for edit in edits_of(RouterInModel(first, number, routers), subjects):
            with np.errstate(over="ignore", invalid="ignore"):
                left = effective_rows_of(edit.router, some) - now
            if not _spread(left) <= _FIRST_SHARE * _spread(then - now):
                continue
            yield EditFit(
                effective_rows_of(edit.router, pair.place),
                3.0 + edit.bits,
                kind=edit.text,
                size=pair.change_size,
                evidence={"edit": edit.name},
            )

    return fits


def _spread(change: Float64[np.ndarray, "rows dimension"]) -> float:
    """The size of a change, a common vector removed where it can be told."""
    return size(change - change.mean(axis=0)) if len(change) > 2 else size(change)


GAIN = Edit(
    "gain applied otherwise",
    "{kind}, rows moved by {size}",
    "the effective router weighs its inputs by another gain: choices change.",
    fit=_of_list("gain"),
    gate=error_if_exact,
)


def _other_order(pair: RowPair) -> Iterator[EditFit]:
    """Columns of the weight in another order, whichever it is, where they are the same bits."""
    yield from _of_list("columns", "layout")(pair)
    if pair.is_projected or not pair.is_stored:
        return
    first, second = (router.weight for router in pair.routers)
    columns = [np.ascontiguousarray(one.T) for one in (first[pair.place], second)]
    if columns[0].dtype != columns[1].dtype:
        return
    keys = [one.view(f"V{one.shape[1] * one.itemsize}").ravel() for one in columns]
    sorts = [np.argsort(key, kind="stable") for key in keys]
    hidden = len(keys[0])
    if (keys[0][sorts[0]] != keys[1][sorts[1]]).any():
        return
    order = np.empty(hidden, np.int64)
    order[sorts[1]] = sorts[0]
    moved = int((order != np.arange(hidden)).sum())
    if not moved:
        return
    edited = dataclasses.replace(pair.routers[0], weight=first[:, order])
    yield EditFit(
        effective_rows_of(edited, pair.place),
        math.lgamma(moved + 1) / math.log(2.0),
        kind=f"columns in another order ({moved} of {hidden})",
        size=pair.change_size,
    )


COLUMNS_MOVED = Edit(
    "columns moved",
    "{kind}, rows moved by {size}",
    "each column reads another number of the router input: choices change.",
    fit=_other_order,
    gate=error,
)

#: Bits for a fit that other edits explain more simply.
_SEARCHED = 64.0

#: Rows and columns that share a scale, in formats with scales by block.
_BLOCKS = ((128, 128), (1, 128), (1, 64), (1, 32), (1, 16))


def _block_scales(pair: RowPair) -> Iterator[EditFit]:
    """A factor for each block of the weight that has a scale of its own."""
    rows, columns = pair.a.shape
    if pair.is_projected or not pair.is_stored or rows < _LEAST_ROWS_FOR_COLUMNS:
        return
    for height, width in _BLOCKS:
        height = min(height, rows)
        if rows % height or columns % width or columns == width:
            continue
        shape = (rows // height, height, columns // width, width)
        first, second = pair.a.reshape(shape), pair.b.reshape(shape)
        square = np.einsum("ibjc,ibjc->ij", first, first)
        product = np.einsum("ibjc,ibjc->ij", first, second)
        factors = np.divide(product, square, out=np.ones_like(square), where=square > 0.0)
        if not factors.any():
            return
        fitted = (first * factors[:, None, :, None]).reshape(rows, columns)
        left = max(size(pair.left_of(fitted)), float(pair.finest.max()))
        low, high = np.percentile(factors, [5, 95]).tolist()
        is_permuted = bool((factors > 0.0).all()) and abs(np.log(factors).mean()) < _SAME_PRODUCT
        order = "; their product is 1, as of scales in another order" if is_permuted else ""
        yield EditFit(
            fitted,
            number_bits(factors.size, pair.a.size, size(pair.left), left) + _SEARCHED,
            kind=f"blocks of {height} x {width}",
            detail=f"factors {low:.3g} to {high:.3g} (5 % to 95 % of the blocks){order}",
            size=pair.change_size,
            evidence={"low": low, "high": high},
            steps=np.maximum(1.0, np.abs(factors).max()),
        )


#: Mean logarithm of factors whose product is 1, but for the rounding of scales.
_SAME_PRODUCT = 2.0**-9

BLOCKS_SCALED = Edit(
    "blocks scaled",
    "{kind} scaled, rows moved by {size}",
    "scales of blocks are not those that the codes were made with: choices change.",
    fit=_block_scales,
    gate=error_if_exact,
)

#: A rotation changes the Gram matrix by at most this share of what noise as large as the change of
#: the rows would: noise is noise, however small.
_GRAM_SHARE = 0.125

#: ... and by no more than so many times what rounding can; what float32 leaves of a product of two
#: matrices comes on top.
_ROUNDINGS, _PRODUCTS = 2.0, 1e-5

#: Rows that moved by so much of their length would be those of another router if they had not
#: turned: then other noise than rounding may have come with the rotation.
_FAR = 0.7


#: Lengths that are told from those of other rows by fewer bits may be equal by chance.
_LENGTH_BITS = 16.0


def _rotated(pair: RowPair) -> Iterator[EditFit]:
    """Rows that differ by more than rounding while W diag(g)^2 W^T does not."""
    length = size(pair.a)
    if pair.is_projected or length == 0.0 or len(pair.a) < LEAST_ROWS_FOR_GRAM:
        return
    moved = share(size(pair.b - pair.a), length)
    rounding = share(size(pair.half_step), length)
    if moved <= 2.0 * rounding:
        return
    noise = gram_noise(pair.a, pair.b)
    is_rounding = noise <= _ROUNDINGS * rounding + _PRODUCTS
    if not noise <= _GRAM_SHARE * moved or not (is_rounding or moved >= _FAR):
        return
    entries = len(pair.a) * (len(pair.a) + 1) / 2.0
    yield EditFit(
        pair.b,
        3.0,
        size=moved,
        detail=f"rows moved by {percent(moved)}, their Gram matrix as noise of {percent(noise)} "
        "would change it",
        evidence={"gram_noise": noise, "rms_change": moved},
        saved=entries * float(np.log2(moved / max(noise, rounding, _PRODUCTS))),
    )


def _turned(pair: RowPair) -> Iterator[EditFit]:
    """Projected rows far from those of A, of unchanged lengths.

    Noise of so much of a row would change its length by a quarter.
    """
    if pair.lengths is None or pair.new_lengths is None or len(pair.a) < LEAST_ROWS_FOR_GRAM:
        return
    if min(pair.lengths.min(), pair.new_lengths.min()) <= 0.0:
        return
    moved = share(size(pair.b - pair.a), size(pair.a))
    before = np.log(pair.lengths[pair.place])
    sizes = np.linalg.norm(pair.b, axis=1)
    if not sizes.all():  # a row of zeros is none that turned
        return
    rounding = np.linalg.norm(pair.half_step, axis=1) / sizes
    is_kept = np.abs(np.log(pair.new_lengths) - before) <= rounding
    bits = len(before) * float(np.log2(max(before.std() / rounding.max(), 1.0)))
    if moved < _FAR or not is_kept.all() or bits < _LENGTH_BITS:
        return
    detail = f"rows moved by {percent(moved)}, and each is as long as it was"
    yield EditFit(pair.b, 3.0, size=moved, detail=detail, saved=bits)


def _rotated_alone(pair: RowPair) -> Iterator[EditFit]:
    """The weight turned as if no gain stood in front of it."""
    if pair.is_projected or not pair.is_stored or len(pair.a) < LEAST_ROWS_FOR_GRAM:
        return
    first, second = pair.routers
    if first.gain is None or second.gain is None or np.ptp(second.gain) == 0.0:
        return
    raw = first.weight[pair.place].astype(np.float64), second.weight.astype(np.float64)
    moved = share(size(raw[1] - raw[0]), size(raw[0]))
    steps = share(size(pair.half_step), size(pair.a))
    noise = gram_noise(*raw)
    if moved > _FAR and noise <= _ROUNDINGS * steps + _PRODUCTS:
        yield EditFit(
            pair.b,
            3.0,
            size=pair.change_size,
            detail="W W^T is the same, W diag(g)^2 W^T is not",
            # an order of the columns is a rotation too, and says more
            saved=0.5 * pair.a.size * np.log2(moved / max(noise, steps)),
        )


ROTATED_ALONE = Edit(
    "rotated beside its gain",
    "rotated beside its gain",
    "a rotation was folded into the weight and not the gain in front: choices change. Fold the "
    "gain first.",
    fit=_rotated_alone,
    gate=error,
)


def _judge(change: Change, pair: Exported) -> Judgement:
    noise, allowed = float(change.evidence["gram_noise"]), pair.own_rounding()
    effect = f"W diag(g)^2 W^T changed as noise of {percent(noise)} on the rows would change it"
    if noise <= allowed:
        return Judgement("passed", f"{effect} (A's own precision: {percent(allowed)}).")
    return Judgement(
        "failed", f"{effect}; A's own precision leaves {percent(allowed)}: digits were lost."
    )


ROTATED = Edit(
    "rotated",
    "rotated",
    "W diag(g)^2 W^T is the same: the same function if the hidden states were rotated alike, "
    "which routers alone do not tell.",
    _judge,
    _rotated,
)

TURNED = Edit(
    "turned",
    "turned, each as long as it was",
    "the same function if rows and hidden states were rotated alike, which needs the rows of "
    "both checkpoints to be told.",
    always("inconclusive"),
    _turned,
)


#: Ranks that are tried: up to this part of the smaller side.
_PART = 4


def _low_rank(pair: RowPair) -> Iterator[EditFit]:
    most = min(pair.a.shape) // _PART
    if pair.is_projected or most < 1 or LOW_RANK.name in pair.named:
        return
    finest = float((pair.finest**2).sum()) ** 0.5
    # what is common to all rows may be a part of the update
    apart = number_bits(pair.a.shape[1], pair.a.size, 1.0, 1.0) if pair.shift.any() else 0.0
    for change, common in ((pair.b - pair.a, 0.0), (pair.left, apart)):
        part = low_rank_part(change, finest, most)
        if part is not None:
            yield EditFit(
                pair.a + part.change,
                part.bits + common,
                kind=str(part.rank),
                detail=f"{percent(part.share)} of the squared change has rank {part.rank}",
                size=share(size(part.change), pair.length),
                evidence={"rank": part.rank, "share": part.share},
            )


LOW_RANK = Edit(
    "update of low rank",
    "update of rank {kind} by {size}",
    "the change lives in few directions, as a merged adapter leaves it. Tokens near a boundary "
    "can flip; only tokens tell how many.",
    fit=_low_rank,
)
