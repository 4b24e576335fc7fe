"""Rows in another order, copied, scaled one by one, left out or repeated; experts left behind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from moegeom.core.router import Router, Rule
from moegeom.core.shapes import Float64, Int64
from moegeom.core.text import number_of
from moegeom.geometry.description import number_bits
from moegeom.geometry.rows import (
    AWAY,
    common_factor,
    cycles,
    matched_places,
    own_cosines,
    squared_distances,
)
from moegeom.geometry.set_code import log2_sets
from moegeom.studies.changes.edit import Edit, EditFit, Exported, Judgement, error, error_if_exact
from moegeom.studies.changes.record import Change
from moegeom.studies.changes.row_pair import EQUAL, FARTHEST, RowPair, effective_rows_of
from moegeom.studies.faults.scope import listed

#: Rows that are named before the rest is counted, and exchanges of rows.
_MOST_NAMED, _MOST_SWAPS = 3, 4

#: A row has a factor of its own where that takes away half of its distance, and of its length.
_EXPLAINS = 0.5

#: With fewer rows a factor for each row is the common one.
_LEAST_ROWS = 3


# -------------------------------------------------------------------------------------- other order
def _permuted(pair: RowPair) -> Iterator[EditFit]:
    # two rows less their mean are opposite: a swap would be a negation
    a, b = pair.centred if len(pair.a) > 2 else (pair.a, pair.b)
    order = matched_places(a, b)
    moved = int((order != np.arange(len(order))).sum())
    if not moved or PERMUTED.name in pair.named:
        return
    place, rows = pair.place[order], pair.a[order]
    description, mixes = places_in_words(order, pair.rule)
    yield EditFit(
        rows,
        math.lgamma(moved + 1) / math.log(2.0) + log2_sets(len(order), moved),
        kind=f"({moved} of {len(order)} rows)",
        detail=description,
        evidence={"place": place.tolist(), "mixes_groups": mixes},
        measured=common_factor(a[order], b) * rows,
        place=place,
        is_stored=pair.is_stored,
    )


def places_in_words(place: Int64[np.ndarray, "experts"], rule: Rule) -> tuple[str, bool]:
    """The exchanges and cycles of an order in words, and whether it mixes groups of the rule."""
    moved = np.flatnonzero(place != np.arange(len(place))).tolist()
    swaps = ", ".join(f"{expert} was {place[expert]}" for expert in moved[:_MOST_SWAPS])
    more = " ..." if len(moved) > _MOST_SWAPS else ""
    mixed = mixes_groups(place, len(place), rule)
    mixing = "; the new order mixes groups of the rule, so choices change in any case" * mixed
    return f"{swaps}{more}; in {number_of(len(cycles(place)), 'cycle')}{mixing}", mixed


def mixes_groups(place: Int64[np.ndarray, "experts"], before: int, rule: Rule) -> bool:
    """Whether experts of one group of B come from several groups of A, which had ``before``."""
    groups = rule.groups
    if groups is None or len(place) % groups.num_groups or before % groups.num_groups:
        return False
    of_group = place.reshape(groups.num_groups, -1) // (before // groups.num_groups)
    return not bool((of_group == of_group[:, :1]).all())


def _judge_permuted(change: Change, pair: Exported) -> Judgement:
    if change.evidence["mixes_groups"]:
        return Judgement("failed", "the new order mixes groups of the rule: choices change anyway.")
    if pair.experts_followed:
        return Judgement("passed", "rows and experts stand in another order together.")
    text = f"{change.meaning.removesuffix('.')}; samples of experts do not tell it."
    return Judgement("inconclusive", text)


PERMUTED = Edit(
    "permuted",
    "permuted {kind}",
    "the rows stand in another order; harmless where everything else moved along.",
    _judge_permuted,
    _permuted,
)


# ------------------------------------------------------------------------------------------- copies
def _copied(pair: RowPair) -> Iterator[EditFit]:
    """Rows that became equal: the one nearest to its row in A is the source."""
    sources: dict[int, int] = {}
    own = own_cosines(pair.a, pair.b)
    lengths = np.linalg.norm(pair.b, axis=1)
    for first in np.argsort(-np.nan_to_num(own, nan=-1.0), kind="stable").tolist():
        if first in sources or lengths[first] == 0.0:
            continue
        apart = np.linalg.norm(pair.b - pair.b[first], axis=1)
        equal = pair.finest if pair.is_projected else EQUAL * lengths[first]
        near = np.flatnonzero(apart <= equal)
        was_apart = np.linalg.norm(pair.a[near] - pair.a[first], axis=1)
        for copy in near[was_apart > AWAY * lengths[first]].tolist():
            sources.setdefault(copy, first)
    if not sources or 2 * len(sources) > len(pair.a):
        return
    rows = pair.a.copy()
    rows[list(sources)] = pair.a[list(sources.values())]
    listed = ", ".join(
        f"row {copy} is now a copy of row {source}"
        for copy, source in sorted(sources.items())[:_MOST_NAMED]
    )
    rest = len(sources) - _MOST_NAMED
    more = f" and {rest} more" if rest > 0 else ""
    bits = 2.0 * len(sources) * math.log2(len(rows))
    is_copy = np.isin(np.arange(len(rows)), list(sources))
    # a common factor that is still to be found is no part of it
    measured = np.where(is_copy[:, None], pair.b, pair.a)
    evidence = {"sources": sources}
    detail = f"{listed}{more}"
    yield EditFit(rows, bits, detail, evidence=evidence, measured=measured, of_rows=is_copy)


COPIED = Edit(
    "rows copied",
    "{kind}",
    "equal rows tie for every token: a copy is chosen where its source is; what the row chose "
    "before is lost.",
    fit=_copied,
    gate=error,
)


# ---------------------------------------------------------------------------------- factors of rows
def _scaled_rows(pair: RowPair) -> Iterator[EditFit]:
    experts, dimension = pair.a.shape
    square = np.einsum("ij,ij->i", pair.a, pair.a)
    products = np.einsum("ij,ij->i", pair.a, pair.b)
    factors = np.divide(products, square, out=np.ones_like(square), where=square > 0.0)
    moved = np.linalg.norm(pair.b - pair.a, axis=1)
    left = np.linalg.norm(pair.b - factors[:, None] * pair.a, axis=1)
    steps = np.linalg.norm(pair.half_step, axis=1)
    # beside the rows of B as well: next to long rows nothing would explain short ones
    most = _EXPLAINS * np.minimum(moved, np.linalg.norm(pair.b, axis=1))
    is_scaled = (moved > FARTHEST * steps) & (left <= most)
    if 2 * is_scaled.sum() > experts:
        # also rows whose factor happens to be near 1
        is_scaled |= left <= _EXPLAINS * np.linalg.norm(pair.b, axis=1)
    # a factor that most rows have is theirs together
    usual = float(np.median(factors))
    apart = np.abs(factors - usual) * np.sqrt(square)
    is_usual = is_scaled & (apart <= 2.0 * max(1.0, abs(usual)) * pair.finest)
    if 2 * is_usual.sum() > experts:
        is_scaled &= ~is_usual
    number = int(is_scaled.sum())
    if experts < _LEAST_ROWS or not number or (not factors[is_scaled].any() and number == experts):
        return
    factors = np.where(is_scaled, factors, 1.0)
    scaled = {int(expert): float(factors[expert]) for expert in np.flatnonzero(is_scaled)}
    before, after = (float(np.linalg.norm(x[is_scaled])) for x in (moved, left))
    yield EditFit(
        factors[:, None] * pair.a,
        number_bits(number, dimension, before, max(after, float(pair.finest.max())))
        + log2_sets(experts, number),
        kind=_factors_in_words(scaled, experts),
        evidence={"factors": scaled},
        of_rows=is_scaled,
        steps=np.maximum(1.0, np.abs(factors))[:, None],
    )


def _factors_in_words(factors: Mapping[int, float], experts: int) -> str:
    """``expert 5 scaled by 3.0``; the range of the factors where there are many."""
    if len(factors) > _MOST_NAMED:
        low, high = _factor_text(min(factors.values())), _factor_text(max(factors.values()))
        many = f"{len(factors)} of {experts} experts"
        if not any(factors.values()):
            return f"{many} set to zero"
        return f"{many} scaled, each by its own factor, {low} to {high}"
    parts = (
        f"expert {expert} {'set to zero' if factor == 0.0 else f'scaled by {_factor_text(factor)}'}"
        for expert, factor in factors.items()
    )
    return " and ".join(parts)


def _factor_text(factor: float) -> str:
    text = f"{factor:.3g}"
    return f"{text}.0" if text.lstrip("-").isdecimal() else text


SCALED_ROWS = Edit(
    "rows scaled",
    "{kind}",
    "tokens that point their way choose these experts more, or less, than before.",
    fit=_scaled_rows,
    gate=error_if_exact,
)


#: A row of B is that of A which is nearer than this share of the next one, and of its own length.
_NEARER = 0.5

#: Share of the rows of B that must be such.
_MOST = 0.9


def subset_places(
    a: Float64[np.ndarray, "before dimension"], b: Float64[np.ndarray, "experts dimension"]
) -> Int64[np.ndarray, "experts"] | None:
    """The row of A that each row of B is; None where too few of them are found."""
    if len(a) < 2 or not len(b):
        return None
    apart = np.sqrt(squared_distances(a, b))
    nearest = apart.argmin(axis=1).astype(np.int64)
    two = np.partition(apart, 1, axis=1)
    lengths = np.linalg.norm(b, axis=1)
    is_found = (two[:, 0] <= _NEARER * two[:, 1]) & (two[:, 0] <= _NEARER * lengths)
    return nearest if is_found.mean() >= _MOST else None


def _places(a: Router, b: Router) -> Iterator[tuple[Int64[np.ndarray, "experts"], EditFit]]:
    if a.hidden_size != b.hidden_size or a.num_experts == b.num_experts:
        return
    before = effective_rows_of(a)
    place = subset_places(before, effective_rows_of(b))
    if place is None:
        return
    sources = np.unique(place)
    number, is_fewer = len(place), len(sources) == len(place)
    if is_fewer:
        kind = f"pruned: {number} of {a.num_experts} rows"
        detail = f"the rows are those of A's experts {listed(place)}"
    else:
        kind = f"rows repeated: {number} from {len(sources)} of {a.num_experts}"
        detail = f"row by row A's experts {listed(place)}"
    mixed = is_fewer and mixes_groups(place, a.num_experts, b.rule)
    if mixed:
        detail += "; experts of one group of the rule come from several groups of A"
    yield (
        place,
        EditFit(
            before[place],
            log2_sets(a.num_experts, min(number, a.num_experts)),
            kind=kind,
            detail=detail,
            evidence={"place": place.tolist(), "mixes_groups": mixed},
            place=place,
        ),
    )


def _judge(change: Change, pair: Exported) -> Judgement:
    if change.evidence["mixes_groups"]:
        text = "experts of one group come from several groups of A: groups compete otherwise."
        return Judgement("failed", text)
    if pair.experts_followed:
        text = "each row is one of A's and its expert came along: all that a prune may change."
        return Judgement("passed", text)
    if pair.experts_followed is False:
        return Judgement("failed", "each row is one of A's; its expert did not come along.")
    text = "each row is one of A's; samples of experts do not tell whether these came along."
    return Judgement("inconclusive", text)


PRUNED = Edit(
    "pruned",
    "{kind}",
    "tokens that chose experts which are gone go to others.",
    _judge,
    fit_places=_places,
)


LEFT_BEHIND = Edit(
    "experts left behind",
    "experts left behind {kind}",
    "rows changed places, or went, and experts did not move along: tokens go to other experts.",
)

MOVED_ALONE = Edit(
    "experts moved alone",
    "experts moved alone {kind}",
    "experts changed places and rows did not: tokens go to other experts.",
)

NOT_COMPARED = Edit("not compared", "not compared: {kind}", "nothing is known about these routers.")
