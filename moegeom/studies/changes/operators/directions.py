"""Rows that turned together, and an update in few directions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.core.text import percent
from moegeom.geometry.description import low_rank_part, number_bits
from moegeom.geometry.rows import LEAST_ROWS_FOR_GRAM, gram_noise, size
from moegeom.studies.changes.edit import Edit, Exported, Judgement, RowFit, always
from moegeom.studies.changes.record import Change
from moegeom.studies.changes.row_pair import RowPair, share

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


def _rotated(pair: RowPair) -> Iterator[RowFit]:
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
    yield RowFit(
        pair.b,
        3.0,
        size=moved,
        detail=f"rows moved by {percent(moved)}, their Gram matrix as noise of {percent(noise)} "
        "would change it",
        evidence={"gram_noise": noise, "rms_change": moved},
        saved=entries * float(np.log2(moved / max(noise, rounding, _PRODUCTS))),
    )


def _turned(pair: RowPair) -> Iterator[RowFit]:
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
    yield RowFit(pair.b, 3.0, size=moved, detail=detail, saved=bits)


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
    "which only the Gram matrix can tell and this checkpoint alone cannot.",
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


def _low_rank(pair: RowPair) -> Iterator[RowFit]:
    most = min(pair.a.shape) // _PART
    if pair.is_projected or most < 1 or LOW_RANK.name in pair.named:
        return
    finest = float((pair.finest**2).sum()) ** 0.5
    # what is common to all rows may be a part of the update
    apart = number_bits(pair.a.shape[1], pair.a.size, 1.0, 1.0) if pair.shift.any() else 0.0
    for change, common in ((pair.b - pair.a, 0.0), (pair.left, apart)):
        part = low_rank_part(change, finest, most)
        if part is not None:
            yield RowFit(
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
    "the change lives in few directions, as a merged adapter leaves it: tokens near a boundary "
    "flip; how many only tokens can tell.",
    fit=_low_rank,
)
