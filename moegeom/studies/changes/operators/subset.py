"""Fewer rows than A has, or more: experts that were pruned, or repeated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Float64, Int64
from moegeom.geometry.rows import squared_distances
from moegeom.geometry.set_code import log2_sets
from moegeom.studies.changes.edit import Edit, Exported, Judgement, RowFit, says
from moegeom.studies.changes.operators.rows import mixes_groups
from moegeom.studies.changes.record import Change
from moegeom.studies.changes.row_pair import effective_rows_of
from moegeom.studies.faults.scope import listed

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


def _places(a: Router, b: Router) -> Iterator[tuple[Int64[np.ndarray, "experts"], RowFit]]:
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
        RowFit(
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
    text = "each row is one of A's; it is another function on purpose, and only text tells how far."
    return Judgement("inconclusive", text)


PRUNED = Edit(
    "pruned",
    "{kind}",
    says("tokens that chose experts which are gone go to others."),
    _judge,
    fit_places=_places,
)
