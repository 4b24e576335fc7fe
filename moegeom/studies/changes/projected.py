"""What happened to a router of which only results are left: from 32 projections of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from moegeom.core.router import GroupMask, Rule, Weights
from moegeom.core.row_keys import is_whole
from moegeom.geometry.rows import matched_places, row_changes, size
from moegeom.results.reader import ResultsView
from moegeom.studies.changes.bias import Biases, bias_changes
from moegeom.studies.changes.effective import explained
from moegeom.studies.changes.router import permuted
from moegeom.studies.changes.row_pair import RowPair
from moegeom.studies.changes.words import change
from moegeom.studies.diff.record import Change, RouterChange, percent

Row = Mapping[str, Any]

_UNKNOWN = "whether the experts moved along is not in results: compare the checkpoints, --experts"

#: Projected rows that differ by less than this are the same but for rounding to bfloat16.
_FOLDED = 2.0**-8


class ProjectedRouters:
    """The routers of results, by name, with what results keep of their rows."""

    def __init__(self, results: ResultsView) -> None:
        self.facts = {entry["name"]: entry for entry in results.run["routers"]}
        self._layers = {r["router"]: r for r in results.rows("layers") if _is_whole(r)}
        self._experts: dict[str, list[Row]] = {}
        for row in results.rows("experts"):
            if _is_whole(row):
                self._experts.setdefault(row["router"], []).append(row)

    def names(self) -> list[str]:
        """In the order of the checkpoint."""
        return list(self.facts)

    def rule(self, router: str) -> Rule:
        """The rule, as far as the meaning of a change depends on it."""
        facts = self.facts[router]
        fill = facts.get("group_fill")
        groups = None
        if fill is not None:
            groups = GroupMask(facts["num_groups"], facts["num_groups"], "max", float(fill))
        return Rule(
            top_k=facts["top_k"],
            score=facts["score"],
            weights=Weights("scores"),
            has_selection_bias=facts["has_selection_bias"],
            has_logit_bias=facts["has_logit_bias"],
            groups=groups,
        )

    def digest(self, router: str, part: str) -> str | None:
        """Hash of the weight, the gain or a bias; None where there is none."""
        return self._layers.get(router, {}).get(f"{part}_digest")

    def shape(self, router: str) -> tuple[int, int]:
        """Experts and hidden size."""
        return self.facts[router]["num_experts"], self.facts[router]["hidden_size"]

    def projections(self, router: str) -> Float64[np.ndarray, "experts count"] | None:
        """Those of the centred effective rows; None when they were not measured."""
        return _array([row.get("row_projections") for row in self._experts.get(router, ())])

    def all_projections(self) -> dict[str, Float64[np.ndarray, "experts count"]]:
        """Those of every router that has them."""
        found = {name: self.projections(name) for name in self.names()}
        return {name: values for name, values in found.items() if values is not None}

    def mean(self, router: str) -> Float64[np.ndarray, "count"] | None:
        """Those of the mean effective row."""
        found = _array([self._layers.get(router, {}).get("mean_row_projections")])
        return None if found is None else found[0]

    def biases(self, router: str) -> Biases:
        """Selection bias and logit bias as the table of experts holds them."""
        rows = self._experts.get(router, ())
        values = {
            name: _array([row.get(name.replace(" ", "_")) for row in rows])
            for name in ("selection bias", "logit bias")
        }
        return Biases(values, self.facts[router]["bias_dtype"], self.rule(router))


def compare_projected(
    a: ProjectedRouters, b: ProjectedRouters, router: str, source: str = ""
) -> RouterChange:
    """The change of one router of B, from ``source`` of A or the one of its name.

    Equal weights and gains are exact; all else is approximate. Distances from 32 projections are
    true to 12 %. A fold of the gain shows as no change; a cast, a rotation and factors for columns
    have no pattern.
    """
    rule, before = b.rule(router), source or router
    own = np.arange(b.shape(router)[0])
    if a.shape(before) != b.shape(router):
        shapes = "{} x {} in A, {} x {} in B".format(*a.shape(before), *b.shape(router))
        return RouterChange(router, (change("not compared", rule, kind=shapes),))
    is_same = {part: _is_same(a, b, (before, router), part) for part in ("weight", "gain")}
    beside = ("gain equal" if is_same["gain"] else "gain different",)
    if a.digest(before, "gain") is None and b.digest(router, "gain") is None:
        beside = ()
    if all(is_same.values()):
        return RouterChange(router, tuple(bias_changes(a.biases(before), b.biases(router), own)))
    pair = _pair(a, b, (before, router))
    if pair is None:
        kind = "results hold no projections of its rows"
        return RouterChange(router, (change("not compared", rule, kind=kind),), beside)
    place, rows = _rows(pair, rule, **is_same)
    found = (*rows, *bias_changes(a.biases(before), b.biases(router), place))
    said = (_UNKNOWN,) if (place != own).any() else ()
    return RouterChange(router, found, (*beside, *said))


def _rows(
    pair: RowPair, rule: Rule, *, weight: bool, gain: bool
) -> tuple[Int64[np.ndarray, "experts"], list[Change]]:
    """Which row is which, and changes; ``weight`` and ``gain`` say what is bit for bit the same."""
    own = np.arange(len(pair.a))
    moved = size(pair.b - pair.a) / max(size(pair.a), float(np.finfo(np.float64).tiny))
    if weight:
        largest = percent(float(row_changes(pair.a, pair.b).max()))
        detail = f"the weight is bit for bit the same; effective rows moved by up to {largest}"
        return own, [change("gain not compensated", rule, size=moved, detail=detail)]
    place = matched_places(pair.a, pair.b)
    found = [] if (place == own).all() else [permuted(rule, place)]
    pair = RowPair(pair.a[place], pair.b, pair.mean_a, pair.mean_b, pair.half_step)
    named = explained(pair, rule, is_named=bool(found), is_projected=True)
    if not gain and moved < _FOLDED:
        named = [change("gain folded", rule, detail=f"change {percent(moved)}, by projection")]
    return place, [*found, *named]


def _pair(a: ProjectedRouters, b: ProjectedRouters, routers: tuple[str, str]) -> RowPair | None:
    rows, means = (
        [view.projections(name) for view, name in zip((a, b), routers, strict=True)],
        [view.mean(name) for view, name in zip((a, b), routers, strict=True)],
    )
    if rows[0] is None or rows[1] is None or means[0] is None or means[1] is None:
        return None
    # float32 storage is all the rounding that is known of
    half_step = np.abs(rows[0]) * 2.0**-24
    return RowPair(rows[0], rows[1], means[0], means[1], half_step)


def _is_same(a: ProjectedRouters, b: ProjectedRouters, routers: tuple[str, str], part: str) -> bool:
    if a.digest(routers[0], "weight") is None or b.digest(routers[1], "weight") is None:
        return False  # results from before digests
    return a.digest(routers[0], part) == b.digest(routers[1], part)


def _is_whole(row: Row) -> bool:
    return row["variant"] == "as_stored" and is_whole(row["population"])


def _array(values: Sequence[Any]) -> np.ndarray | None:
    if not values or any(value is None for value in values):
        return None
    found = np.array(values, dtype=np.float64)
    return found if np.isfinite(found).all() else None
