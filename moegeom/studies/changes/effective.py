"""What happened to the effective rows W diag(g): folded, scaled, shifted, rotated, noise."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float64, Int64

from moegeom.core.router import Router, Rule
from moegeom.geometry.rows import (
    AWAY,
    column_factors,
    common_factor,
    gram_noise,
    likeness_z,
    matched_places,
    own_cosines,
    row_changes,
    size,
)
from moegeom.studies.changes.row_pair import RowPair, stored_bits
from moegeom.studies.changes.words import change
from moegeom.studies.diff.record import Change, percent

#: A change is named when it takes away at least half of the distance that was left: three quarters
#: of the squared change.
EXPLAINS = 0.5

#: The word for rows of another router.
UNRELATED = "unrelated"

#: Below this many standard errors own rows are no more alike than those of different experts.
_UNRELATED_Z = 4.0

#: What is left is rounding up to this share of the largest that rounding can leave, both rms.
#: Rounding leaves .42 of it (docs/theory.md E4), at most .58.
_WITHIN = 0.6

#: ... and no single value is further off than this many half steps.
_FARTHEST = 6.0

#: With fewer rows a factor for each column explains much by chance.
_LEAST_ROWS_FOR_COLUMNS = 4

#: Experts that are named as having moved most.
_MOST_MOVED = 3

#: A ratio of lengths this far from 1 is worth telling.
_OTHER_LENGTH = 0.1

#: A rotation changes the Gram matrix by at most this share of what noise as large as the change of
#: the rows would: noise is noise, however small.
_GRAM_SHARE = 0.125

#: Rows this close, beside their length, are equal: effective rows and projections carry float64.
_EQUAL = 1e-12

#: With fewer rows a factor for each row is the common one.
_LEAST_ROWS_FOR_ROWS = 3


def effective_changes(
    a: Router, b: Router, place: Int64[np.ndarray, "experts"], rows: RowPair
) -> list[Change]:
    """Changes of finite rows that are neither equal nor exactly rounded.

    Row i of ``b`` was row ``place[i]`` of ``a``; ``rows`` are the effective rows in that order.
    """
    rule = b.rule
    found: list[Change] = []
    distance = size(rows.b - rows.a)
    if _is_other_gain(a, b):
        if np.array_equal(a.weight[place], b.weight):
            uniform = _uniform_gain(rows, rule)
            return [_not_compensated(rows, rule) if uniform is None else uniform]
        alike = min(_distance_without_fold(a, b, place), size(rows.a), size(rows.b))
        if distance <= EXPLAINS * alike:
            left = _share(distance, size(rows.a))
            found.append(change("gain folded", rule, effective_change=left))
    stored = [r.provenance.stored_dtype for r in (a, b)]
    if not found and _is_rounding(rows) and stored_bits(stored[1]) < stored_bits(stored[0]):
        moved = _share(size(rows.b - rows.a), size(rows.a))
        kind = f"B is A, rounded to {stored[1].lower()}, not always to the nearest"
        return [change("rounded", rule, kind=kind, size=moved, rms_change=moved)]
    return found + explained(rows, rule, is_named=bool(found))


def place_of(rows: RowPair) -> Int64[np.ndarray, "experts"]:
    """Row i of B is row ``place[i]`` of A; i itself unless rows changed places."""
    if len(rows.a) == 2:  # two rows less their mean are opposite: a swap would be a negation
        return matched_places(rows.a + rows.mean_a, rows.b + rows.mean_b)
    return matched_places(rows.a, rows.b)


def explained(
    rows: RowPair, rule: Rule, is_named: bool = False, is_projected: bool = False
) -> list[Change]:
    """Factors, a common vector and a rotation that explain the change, and the noise that is left.

    Everything is measured on centred rows, so that a common vector disturbs nothing. What is left
    is not called noise when it is within rounding and something else is named (``is_named`` before
    this, or here).
    """
    rows, copied = _copied_rows(rows, rule)
    is_named = is_named or bool(copied)
    factor, found = _factor(rows, rule)
    if not found and not is_projected and (rotated := _rotated(rows, rule)) is not None:
        return [*copied, rotated]
    if not found:
        rows, found = _scaled_rows(rows, rule)
    columns = np.ones(rows.a.shape[1])
    if not found and not is_projected:
        columns, found = _columns(rows, rule)
    is_like = bool(found)
    expected = factor * rows.a * columns
    rest = RowPair(
        expected, rows.b, factor * rows.mean_a * columns, rows.mean_b, _steps(rows, factor)
    )
    found += _shift(rest, rule)
    if not _is_rounding(rest) or not (found or is_named):
        noise = _noise(rest, rule, not is_like, is_projected)
        if noise is not None and noise.word == UNRELATED:
            return [noise]  # of another router nothing else is worth telling
        found += [] if noise is None else [noise]
    return copied + found


def _steps(rows: RowPair, factor: float) -> Float64[np.ndarray, "experts dimension"]:
    return rows.half_step * max(1.0, abs(factor))


def _share(part: float, whole: float) -> float:
    """Infinite where there was nothing and is something; 0 where there still is nothing."""
    return part / whole if whole > 0.0 else float("inf") if part > 0.0 else 0.0


def _is_other_gain(a: Router, b: Router) -> bool:
    if a.gain is None and b.gain is None:
        return False
    gains = [np.ones(r.hidden_size) if r.gain is None else r.gain for r in (a, b)]
    return not np.array_equal(gains[0], gains[1])


def _not_compensated(rows: RowPair, rule: Rule) -> Change:
    moved = row_changes(rows.a, rows.b)
    left = _share(size(rows.b - rows.a), size(rows.a))
    return change(
        "gain not compensated",
        rule,
        size=left,
        detail="the weight is bit for bit the same; effective rows moved by up to "
        + percent(float(moved.max())),
        rms_change=left,
        largest_change=float(moved.max()),
    )


def _uniform_gain(rows: RowPair, rule: Rule) -> Change | None:
    """A gain that was multiplied by one positive number: a factor of the rows, nothing else."""
    factor = common_factor(rows.a, rows.b)
    rest = RowPair(factor * rows.a, rows.b, factor * rows.mean_a, rows.mean_b, _steps(rows, factor))
    if factor <= 0.0 or not _is_rounding(rest) or _shift(rest, rule):
        return None
    kind = f"by {factor:.3g}"
    detail = "by the gain; the weight is bit for bit the same"
    return change("scaled", rule, kind=kind, detail=detail, factor=factor)


def _distance_without_fold(a: Router, b: Router, place: Int64[np.ndarray, "experts"]) -> float:
    """Distance of the centred rows if the weight had changed as it did, and the gain had not."""
    gain = 1.0 if a.gain is None else a.gain.astype(np.float64)
    moved = (b.weight.astype(np.float64) - a.weight[place]) * gain
    return size(moved - moved.mean(axis=0))


def _rotated(rows: RowPair, rule: Rule) -> Change | None:
    """Rows that differ by more than rounding while W diag(g)^2 W^T does not."""
    length = size(rows.a)
    raw_a, raw_b = rows.a + rows.mean_a, rows.b + rows.mean_b
    left = _share(size(raw_b - raw_a), size(raw_a))
    rounding = _share(size(rows.half_step), size(raw_a))
    if length == 0.0 or left <= 2.0 * rounding:
        return None
    noise = gram_noise(raw_a, raw_b)
    if not noise <= _GRAM_SHARE * left:
        return None
    return change(
        "rotated",
        rule,
        size=left,
        detail=f"rows moved by {percent(left)}, their Gram matrix as noise of {percent(noise)} "
        "would change it",
        rms_change=left,
        gram_noise=noise,
    )


def _factor(rows: RowPair, rule: Rule) -> tuple[float, list[Change]]:
    """One factor for all rows, where that explains the change; else 1."""
    factor = common_factor(rows.a, rows.b)
    left = size(rows.b - factor * rows.a)
    if factor == 0.0 or not _explains(rows, left):
        return 1.0, []
    word = "scaled" if factor > 0.0 else "negated"
    kind = "" if round(factor, 3) == -1.0 else f"by {abs(factor):.3g}"
    return factor, [change(word, rule, kind=kind, factor=factor)]


def _scaled_rows(rows: RowPair, rule: Rule) -> tuple[RowPair, list[Change]]:
    """Rows that were multiplied by factors of their own, and the pair with these taken out."""
    experts = len(rows.a)
    raw_a, raw_b = rows.a + rows.mean_a, rows.b + rows.mean_b
    square = np.einsum("ij,ij->i", raw_a, raw_a)
    products = np.einsum("ij,ij->i", raw_a, raw_b)
    factors = np.divide(products, square, out=np.ones_like(square), where=square > 0.0)
    moved = np.linalg.norm(raw_b - raw_a, axis=1)
    left = np.linalg.norm(raw_b - factors[:, None] * raw_a, axis=1)
    steps = np.linalg.norm(rows.half_step, axis=1)
    # beside the rows of B as well: next to long rows nothing would explain short ones
    most = EXPLAINS * np.minimum(moved, np.linalg.norm(raw_b, axis=1))
    is_scaled = (moved > _FARTHEST * steps) & (left <= most)
    if 2 * is_scaled.sum() > experts:
        is_scaled[:] = True  # also rows whose factor happens to be near 1
    is_emptied = is_scaled.all() and not factors.any()
    if experts < _LEAST_ROWS_FOR_ROWS or not is_scaled.any() or is_emptied:
        return rows, []
    factors = np.where(is_scaled, factors, 1.0)
    raw = factors[:, None] * raw_a
    mean = raw.mean(axis=0)
    half_step = rows.half_step * np.maximum(1.0, np.abs(factors))[:, None]
    scaled = {int(expert): float(factors[expert]) for expert in np.flatnonzero(is_scaled)}
    told = change("rows scaled", rule, kind=_told_factors(scaled, experts), factors=scaled)
    return RowPair(raw - mean, rows.b, mean, rows.mean_b, half_step), [told]


def _copied_rows(rows: RowPair, rule: Rule) -> tuple[RowPair, list[Change]]:
    """Rows that became equal to another row, and the pair in which they were equal before.

    Of rows that are equal in B and were not in A the one nearest to its former self is the source.
    """
    raw_a, raw_b = rows.a + rows.mean_a, rows.b + rows.mean_b
    sources: dict[int, int] = {}
    own = own_cosines(raw_a, raw_b)
    lengths = np.linalg.norm(raw_b, axis=1)
    for first in np.argsort(-np.nan_to_num(own, nan=-1.0), kind="stable").tolist():
        if first in sources or lengths[first] == 0.0:
            continue
        apart = np.linalg.norm(raw_b - raw_b[first], axis=1)
        was_apart = np.linalg.norm(raw_a - raw_a[first], axis=1)
        is_copy = (apart <= _EQUAL * lengths[first]) & (was_apart > AWAY * lengths[first])
        for copy in np.flatnonzero(is_copy).tolist():
            sources.setdefault(copy, first)
    if not sources or 2 * len(sources) > len(raw_a):
        return rows, []
    raw = raw_a.copy()
    raw[list(sources)] = raw_a[list(sources.values())]
    mean = raw.mean(axis=0)
    listed = ", ".join(
        f"row {copy} is now a copy of row {source}"
        for copy, source in sorted(sources.items())[:_MOST_MOVED]
    )
    rest = len(sources) - _MOST_MOVED
    more = f" and {rest} more" if rest > 0 else ""
    told = change("rows copied", rule, kind=f"{listed}{more}", sources=sources)
    return RowPair(raw - mean, rows.b, mean, rows.mean_b, rows.half_step), [told]


def _told_factors(factors: Mapping[int, float], experts: int) -> str:
    """``expert 5 scaled by 3.0``; the range of the factors where there are many."""
    if len(factors) > _MOST_MOVED:
        low, high = _factor_text(min(factors.values())), _factor_text(max(factors.values()))
        many = f"{len(factors)} of {experts} experts"
        return f"{many} scaled, each by its own factor, {low} to {high}"
    told = (
        f"expert {expert} {'set to zero' if factor == 0.0 else f'scaled by {_factor_text(factor)}'}"
        for expert, factor in factors.items()
    )
    return " and ".join(told)


def _factor_text(factor: float) -> str:
    text = f"{factor:.3g}"
    return f"{text}.0" if text.lstrip("-").isdecimal() else text


def _columns(rows: RowPair, rule: Rule) -> tuple[Float64[np.ndarray, "dimension"], list[Change]]:
    """A factor for each column, where that explains the change; else 1."""
    factors = column_factors(rows.a, rows.b)
    left = size(rows.b - rows.a * factors)
    # without a common shift the rows with their means tell the factors better
    whole = column_factors(rows.a + rows.mean_a, rows.b + rows.mean_b)
    if size(rows.b - rows.a * whole) <= 2.0 * left + _WITHIN * size(rows.half_step):
        factors = whole
    if len(rows.a) < _LEAST_ROWS_FOR_COLUMNS or not _explains(rows, left):
        return np.ones_like(factors), []
    low, high = np.percentile(factors, [5, 95]).tolist()
    moved = size(rows.b - rows.a) / size(rows.a)
    told = f"factors {low:.3g} to {high:.3g} (5 % to 95 % of the columns)"
    return factors, [change("columns scaled", rule, size=moved, detail=told, low=low, high=high)]


def _explains(rows: RowPair, left: float) -> bool:
    """True when a distance ``left`` is little beside that of before, and beside the rows of B.

    Beside the second, because next to long rows nothing would explain short ones as well.
    """
    before = size(rows.b - rows.a)
    is_little = left <= EXPLAINS * min(before, size(rows.b))
    return is_little and size(rows.b) > 0.0 and before > _WITHIN * size(rows.half_step)


def _shift(rows: RowPair, rule: Rule) -> list[Change]:
    """One vector added to every row, where it is most of what is left."""
    vector = rows.mean_b - rows.mean_a
    experts = len(rows.a)
    added = float(np.linalg.norm(vector)) * np.sqrt(experts)
    left = size(rows.b - rows.a)
    is_most = left <= EXPLAINS * float(np.hypot(left, added))
    if experts < 2 or not is_most or added <= _WITHIN * size(rows.half_step):
        return []
    lengths = size(rows.a + rows.mean_a)
    share = _share(added, lengths)
    return [
        change(
            "common shift",
            rule,
            size=share,
            detail=f"one vector of length {np.linalg.norm(vector):.3g} added to every row",
            length=float(np.linalg.norm(vector)),
            share=share,
        )
    ]


def _is_rounding(rows: RowPair) -> bool:
    left = np.abs(rows.b - rows.a)
    if size(left) > _WITHIN * size(rows.half_step):
        return False
    # the fitted numbers carry rounding of whole rows and columns: no value is judged without it
    usual = size(rows.half_step) / np.sqrt(max(left.size, 1))
    return bool((left <= _FARTHEST * (rows.half_step + usual)).all())


def _noise(rows: RowPair, rule: Rule, may_be_unrelated: bool, is_projected: bool) -> Change | None:
    """What is left: a change in no special direction, in all rows or in some; or another router."""
    raw = rows.b + rows.mean_b - rows.a - rows.mean_a
    looked = np.flatnonzero((raw != 0.0).any(axis=1))
    is_local = 0 < len(looked) <= len(rows.a) // 2 and not is_projected
    if is_local:
        moved = raw[looked]
    else:
        looked, moved = np.arange(len(rows.a)), rows.b - rows.a
    before = rows.a[looked] + rows.mean_a if is_local else rows.a
    left, length = size(moved), size(before)
    if left == 0.0:
        return None
    cosines = own_cosines(before, before + moved)
    cosines = cosines[~np.isnan(cosines)]
    lowest = float(cosines.min()) if cosines.size else float("nan")
    median = float(np.median(cosines)) if cosines.size else float("nan")
    told = f"cosine of a row with its former self: median {median:.3g}, lowest {lowest:.3g}; "
    z = likeness_z(rows.a, rows.b) if len(rows.a) > 2 else float("nan")
    if not (is_local or cosines.size):
        detail = "the rows of one side are all the same"
        return change(UNRELATED, rule, detail=detail)
    if may_be_unrelated and not is_local and (z < _UNRELATED_Z or _is_random(rows, median)):
        above = f"{z:+.1f} standard errors above that of other rows" if z == z else "too few rows"
        return change(UNRELATED, rule, detail=told + above, z=z, median_cosine=median)
    changes = row_changes(before, before + moved)
    most = {int(looked[i]): float(changes[i]) for i in np.argsort(-changes)[:_MOST_MOVED]}
    listed = ", ".join(f"{expert} ({percent(share)})" for expert, share in most.items())
    ratio = _share(size(before + moved), length)
    longer = f"; rows {ratio:.3g} times as long" if abs(ratio - 1.0) > _OTHER_LENGTH else ""
    return change(
        "noise",
        rule,
        kind=f"{len(looked)} of {len(rows.a)} rows" if is_local else "rows",
        size=_share(left, length),
        detail=f"{told if cosines.size else ''}experts that moved most: {listed}{longer}",
        num_rows=len(looked),
        most_moved=most,
        length_ratio=ratio,
        lowest_cosine=lowest,
        median_cosine=median,
    )


def _is_random(rows: RowPair, cosine: float) -> bool:
    """With one or two rows there are no others to compare with: 4 sigmas of random directions."""
    return len(rows.a) <= 2 and abs(cosine) < _UNRELATED_Z / rows.a.shape[1] ** 0.5
