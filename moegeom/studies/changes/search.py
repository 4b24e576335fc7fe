"""Greedy search for the edits that describe the rows of B in the fewest bits.

An edit is worth the bits that it saves: what is left of each row is said in bits of its length
beside rounding, and so are fitted numbers. It is believed where it saves 50 bits and takes away
half of the distance that is left where it applies; of those that are believed the one that saves
most comes first, then again with what it leaves, three times at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.geometry.description import MatrixRegion, best_rows, best_run, row_bits, whole
from moegeom.geometry.rows import size
from moegeom.studies.changes.bias_pair import BiasPair
from moegeom.studies.changes.edit import EDITS, BiasFit, Edit, RowFit
from moegeom.studies.changes.operators.biases import CHANGED, rest_of
from moegeom.studies.changes.operators.no_pattern import UNRELATED
from moegeom.studies.changes.record import Change
from moegeom.studies.changes.row_pair import RowPair
from moegeom.studies.faults.scope import listed

#: Bits that an edit has to save, and what it may leave of the distance where it applies.
_LEAST_BITS, _LEAVES = 50.0, 0.5

#: Edits that are found one after the other.
_MOST = 3

#: Bits of a bias that is told to the last digit, and those that an edit of biases has to save.
_EXACT, _LEAST_BIAS_BITS = 2.0**-30, 10.0


@dataclass(frozen=True, eq=False)
class _FittedEdit:
    edit: Edit
    fit: RowFit
    region: MatrixRegion
    saved: float


def explained(pair: RowPair) -> tuple[list[Change], RowPair]:
    """The edits of the rows, and the pair with these edits applied to A."""
    changes: list[Change] = []
    edits: list[_FittedEdit] = []
    for _ in range(_MOST):
        if edits and pair.is_settled:
            break
        best = max(_proposals(pair), key=lambda one: one.saved, default=None)
        if best is None:
            break
        edits.append(best)
        pair = _applied(pair, best)
    is_exact = pair.is_rounding
    changes = [_told(one, pair, is_exact) for one in edits]
    shift = [*_of_rest(pair)]
    if any(one.word == UNRELATED.name and one.phrase == UNRELATED.name for one in shift):
        # of another router nothing else is worth telling
        return [one for one in (*changes, *shift) if one.word in _BESIDE_ANOTHER], pair
    return [*changes, *shift], pair


#: What is worth telling beside rows of another router.
_BESIDE_ANOTHER = frozenset({UNRELATED.name, "rows copied", "another layer"})


def _of_rest(pair: RowPair) -> Iterator[Change]:
    for edit in EDITS.all():
        for fit in edit.of_rest(pair):
            yield edit.change(
                pair.rule, kind=fit.kind, size=fit.size, detail=fit.detail, **fit.evidence
            )


def _told(one: _FittedEdit, pair: RowPair, is_exact: bool) -> Change:
    fit = one.fit
    return one.edit.change(
        pair.rule,
        kind=fit.kind,
        size=fit.size,
        detail=fit.detail,
        where=_where(one.region) if fit.allows_subset else "",
        **{**fit.evidence, "bits": one.saved, "is_exact": is_exact},
    )


def _where(region: MatrixRegion) -> str:
    """``rows 3-7 (5 of 32)``, or the run of columns; empty for all."""
    if region.is_whole:
        return ""
    if not region.rows.all():
        rows = np.flatnonzero(region.rows)
        name = "row" if len(rows) == 1 else "rows"
        return f"{name} {listed(rows)} ({len(rows)} of {len(region.rows)})"
    columns = np.flatnonzero(region.columns)
    return f"columns {columns[0]}-{columns[-1]} of {len(region.columns)}"


def _applied(pair: RowPair, one: _FittedEdit) -> RowPair:
    fit = one.fit
    return dataclasses.replace(
        pair,
        a=np.where(one.region.inside, fit.rows, pair.a),
        half_step=pair.half_step * fit.steps,
        place=pair.place if fit.place is None else fit.place,
        lengths=_lengths(pair, fit),
        named=(*pair.named, one.edit.name),
        is_stored=pair.is_stored and fit.is_stored,
    )


def _lengths(pair: RowPair, fit: RowFit) -> Float64[np.ndarray, "experts"] | None:
    """True lengths of projected rows, scaled as their projections were."""
    if pair.lengths is None:
        return None
    before, after = (np.linalg.norm(rows, axis=1) for rows in (pair.a, fit.rows))
    ratio = np.divide(after, before, np.ones(len(after)), where=before > 0.0)
    return pair.lengths * ratio


def _proposals(pair: RowPair) -> Iterator[_FittedEdit]:
    """Edits that save enough bits, each with the region where it saves most."""
    dimension = pair.a.shape[1]
    before = np.linalg.norm(pair.left, axis=1)
    fresh = np.linalg.norm(pair.centred[1], axis=1)
    for edit in EDITS.all():
        for fit in edit.fit(pair):
            everything = whole(*pair.a.shape)
            if fit.saved is not None:
                if (saved := fit.saved - fit.bits) >= _LEAST_BITS:
                    yield _FittedEdit(edit, fit, everything, saved)
                continue
            left = pair.left_of(fit.rows if fit.measured is None else fit.measured)
            after = np.linalg.norm(left, axis=1)
            # rows of another router could be told by themselves; what is exact is told at once
            base = np.where(after <= pair.finest, before, np.minimum(before, fresh))
            of_rows = row_bits(base, after, pair.finest, dimension)
            ways = [(everything, float(of_rows.sum()))]
            if fit.of_rows is not None:
                about = MatrixRegion(fit.of_rows, everything.columns)
                ways = [(about, float(of_rows[fit.of_rows].sum()))]
            if fit.allows_subset:
                ways = [best_rows(of_rows, dimension), _best_columns(pair, left)]
            region, saved = max(ways, key=lambda way: way[1])
            if saved - fit.bits < _LEAST_BITS or not _halves(pair, left, base, region):
                continue
            yield _FittedEdit(edit, fit, region, saved - fit.bits)


def _best_columns(
    pair: RowPair, left: Float64[np.ndarray, "experts dimension"]
) -> tuple[MatrixRegion, float]:
    finest = 0.6 * np.linalg.norm(pair.half_step, axis=0)
    before, after = (np.linalg.norm(x, axis=0) for x in (pair.left, left))
    before = np.minimum(before, np.linalg.norm(pair.centred[1], axis=0))
    return best_run(row_bits(before, after, finest, len(left)), len(left))


def _halves(
    pair: RowPair,
    left: Float64[np.ndarray, "experts dimension"],
    base: Float64[np.ndarray, "experts"],
    region: MatrixRegion,
) -> bool:
    """Whether little is left where the edit applies, beside the change and beside the rows of B."""
    inside = np.ix_(region.rows, region.columns)
    whole_rows = region.columns.all()
    was = float(np.linalg.norm(base[region.rows])) if whole_rows else size(pair.left[inside])
    return size(left[inside]) <= _LEAVES * was


# ------------------------------------------------------------------------------------------- biases
def explained_biases(pair: BiasPair) -> list[Change]:
    """The edits of the biases of one kind; empty where they are equal."""
    changes: list[Change] = []
    for _ in range(_MOST):
        if np.array_equal(pair.a, pair.b) or (changes and _within(pair)):
            return changes
        best = max(_bias_proposals(pair), key=lambda one: one[0], default=None)
        if best is None:
            break
        _, edit, fit = best
        changes.append(_told_bias(pair, edit, fit))
        pair = dataclasses.replace(pair, a=fit.values, named=(*pair.named, edit.name))
    if np.array_equal(pair.a, pair.b) or (changes and _within(pair)):
        return changes
    return [*changes, _told_bias(pair, CHANGED, rest_of(pair))]


def _told_bias(pair: BiasPair, edit: Edit, fit: BiasFit) -> Change:
    return edit.change(
        pair.rule, kind=fit.kind, detail=fit.detail, subject=pair.kind, **fit.evidence
    )


def _within(pair: BiasPair) -> bool:
    return float(np.abs(pair.b - pair.a).max()) <= pair.finest


def _bias_proposals(pair: BiasPair) -> Iterator[tuple[float, Edit, BiasFit]]:
    before = float(np.linalg.norm(pair.b - pair.a))
    scale = float(np.linalg.norm(pair.b)) + float(np.linalg.norm(pair.a))
    for edit in EDITS.all():
        if edit.name in pair.named:
            continue
        for fit in edit.fit_bias(pair):
            left = float(np.linalg.norm(pair.b - fit.values))
            after = max(left, _EXACT * scale)
            is_told = float(np.abs(pair.b - fit.values).max()) <= pair.finest
            saved = len(pair.b) * float(np.log2(before / after)) - fit.bits if before else 0.0
            if saved >= _LEAST_BIAS_BITS and (is_told or left <= _LEAVES * before):
                yield saved, edit, fit
