"""Changes of a router of which only results exist, from 32 projections of each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from moegeom.core.router import GroupMask, Rule, Weights
from moegeom.core.row_keys import is_whole
from moegeom.core.shapes import Float64
from moegeom.core.text import percent
from moegeom.results.reader import ResultsView
from moegeom.studies.changes.bias_pair import KINDS, Biases
from moegeom.studies.changes.operators.gains import FOLDED, NOT_FOLLOWED
from moegeom.studies.changes.operators.places import NOT_COMPARED
from moegeom.studies.changes.record import Change, RouterChange
from moegeom.studies.changes.router import bias_changes
from moegeom.studies.changes.row_pair import OtherRows, RowPair, stored_bits
from moegeom.studies.changes.search import explained

Row = Mapping[str, Any]

_UNKNOWN = "whether the experts moved along is not in results: compare the checkpoints, --experts"

#: Projected rows that differ by less than this are the same but for rounding to bfloat16.
_FOLDED = 2.0**-8


class KeptRouters(Protocol):
    """Routers known without weights, by name: from results, or from a baseline."""

    def names(self) -> list[str]:
        """In the order of the checkpoint."""
        ...

    def rule(self, router: str) -> Rule:
        """The rule, as far as the meaning of a change depends on it."""
        ...

    def digest(self, router: str, part: str) -> str | None:
        """Hash of the weight, the gain or a bias; None where there is none."""
        ...

    def shape(self, router: str) -> tuple[int, int]:
        """Experts and hidden size."""
        ...

    def projections(self, router: str) -> Float64[np.ndarray, "experts count"] | None:
        """Those of the effective rows, means included; None when they were not measured."""
        ...

    def half_step(self, router: str) -> Float64[np.ndarray, "experts count"] | None:
        """The largest rounding error of each projection as it was stored."""
        ...

    def lengths(self, router: str) -> Float64[np.ndarray, "experts"] | None:
        """True lengths of the centred rows."""
        ...

    def biases(self, router: str) -> Biases:
        """Selection bias and logit bias."""
        ...


class ProjectedRouters:
    """The routers of results, by name, with what results keep of their rows."""

    def __init__(self, results: ResultsView) -> None:
        self.facts = {entry["name"]: entry for entry in results.run["routers"]}
        self._layers = {r["router"]: r for r in results.rows("layers") if _is_whole(r)}
        self._experts: dict[str, list[Row]] = {}
        for row in results.rows("experts"):
            if _is_whole(row):
                self._experts.setdefault(row["router"], []).append(row)
        self._rows: dict[str, np.ndarray | None] = {}

    def names(self) -> list[str]:
        """In the order of the checkpoint."""
        return list(self.facts)

    def rule(self, router: str) -> Rule:
        """The rule, as far as the meaning of a change depends on it."""
        return rule_of(self.facts[router])

    def digest(self, router: str, part: str) -> str | None:
        """Hash of the weight, the gain or a bias; None where there is none."""
        return self._layers.get(router, {}).get(f"{part}_digest")

    def shape(self, router: str) -> tuple[int, int]:
        """Experts and hidden size."""
        return self.facts[router]["num_experts"], self.facts[router]["hidden_size"]

    def projections(self, router: str) -> Float64[np.ndarray, "experts count"] | None:
        """Those of the effective rows, means included; None when they were not measured."""
        if router not in self._rows:
            rows = _array([row.get("row_projections") for row in self._experts.get(router, ())])
            mean = _array([self._layers.get(router, {}).get("mean_row_projections")])
            self._rows[router] = None if rows is None or mean is None else rows + mean[0]
        return self._rows[router]

    def half_step(self, router: str) -> Float64[np.ndarray, "experts count"] | None:
        """The largest rounding error of a row in its stored dtype, over its projections."""
        rows = self.projections(router)
        if rows is None:
            return None
        step = 2.0 ** -(stored_bits(self.facts[router]["stored_dtype"]) + 1)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True) / np.sqrt(rows.shape[1])
        return np.ones_like(rows) * lengths * step

    def lengths(self, router: str) -> Float64[np.ndarray, "experts"] | None:
        """True lengths of the centred rows."""
        return _array([row.get("centred_row_norm") for row in self._experts.get(router, ())])

    def biases(self, router: str) -> Biases:
        """Selection bias and logit bias as the table of experts holds them."""
        rows = self._experts.get(router, ())
        values = {kind: _array([row.get(kind.replace(" ", "_")) for row in rows]) for kind in KINDS}
        return Biases(values, self.facts[router]["bias_dtype"], self.rule(router))


def rule_of(facts: Mapping[str, Any]) -> Rule:
    """The rule of a router from the facts that results keep of it."""
    fill = facts.get("group_fill")
    groups = None
    if fill is not None:
        groups = GroupMask(facts["num_groups"], facts["num_groups"], "max", float(fill))
    return Rule(
        top_k=facts["top_k"],
        score=facts["score"],
        weights=Weights(facts.get("weights_from", "scores")),
        has_selection_bias=facts["has_selection_bias"],
        has_logit_bias=facts["has_logit_bias"],
        groups=groups,
    )


def compare_projected(
    a: KeptRouters, b: KeptRouters, router: str
) -> tuple[RouterChange, RowPair | None]:
    """The change of one router, and its projected rows in the order of B where there are any.

    Equal weights and gains are exact; all else is approximate. Distances from 32 projections are
    true to 12 %. A fold of the gain shows as no change; a cast, a rotation, an update of low rank
    and factors for columns have no pattern.
    """
    rule = b.rule(router)
    own = np.arange(b.shape(router)[0])
    if a.shape(router) != b.shape(router):
        shapes = "{} x {} in A, {} x {} in B".format(*a.shape(router), *b.shape(router))
        return RouterChange(router, (NOT_COMPARED.change(rule, kind=shapes),)), None
    is_same = {part: _is_same(a, b, router, part) for part in ("weight", "gain")}
    beside = ("gain equal" if is_same["gain"] else "gain different",)
    if a.digest(router, "gain") is None and b.digest(router, "gain") is None:
        beside = ()
    if all(is_same.values()):
        return RouterChange(router, tuple(_biases(a, b, router, own)), (), own.tolist()), None
    pair = _pair(a, b, router)
    if pair is None:
        kind = "no projections of its rows are known"
        return RouterChange(router, (NOT_COMPARED.change(rule, kind=kind),), beside), None
    rows, left = _rows(pair, **is_same)
    place = left.place
    changes = (*rows, *_biases(a, b, router, place))
    notes = (_UNKNOWN,) if (place != own).any() else ()
    lengths = None if pair.lengths is None else pair.lengths[place]
    aligned = dataclasses.replace(pair, a=pair.a[place], place=place, lengths=lengths)
    return RouterChange(router, changes, (*beside, *notes), place.tolist()), aligned


def _biases(a: KeptRouters, b: KeptRouters, router: str, place: np.ndarray) -> Iterator[Change]:
    for kind in KINDS:
        others = {
            name: values
            for name in a.names()
            if name != router and (values := a.biases(name).values.get(kind)) is not None
        }
        yield from bias_changes(kind, a.biases(router), b.biases(router), place, others)


def _rows(pair: RowPair, *, weight: bool, gain: bool) -> tuple[list[Change], RowPair]:
    """Changes; ``weight`` and ``gain`` say what is bit for bit the same."""
    moved = pair.change_size
    if weight:
        kind = "weight the same, gain changed"
        detail = f"rows W diag(g) moved by {percent(moved)}"
        return [NOT_FOLLOWED.change(pair.rule, kind=kind, size=moved, detail=detail)], pair
    if not gain and moved < _FOLDED:
        detail = f"rows moved by {percent(moved)}, by projection"
        return [FOLDED.change(pair.rule, detail=detail)], pair
    return explained(pair)


def _pair(a: KeptRouters, b: KeptRouters, router: str) -> RowPair | None:
    rows = a.projections(router), b.projections(router)
    steps = a.half_step(router), b.half_step(router)
    if rows[0] is None or rows[1] is None or steps[0] is None or steps[1] is None:
        return None

    def known() -> Mapping[str, Float64[np.ndarray, "others count"]]:
        return {name: array for name in a.names() if (array := a.projections(name)) is not None}

    others = OtherRows(known, lambda values: values, lambda name: {"": known()[name]})
    return RowPair(
        rows[0],
        rows[1],
        steps[0] + steps[1],
        b.rule(router),
        np.arange(len(rows[0])),
        name=router,
        others=others,
        lengths=a.lengths(router),
        new_lengths=b.lengths(router),
    )


def _is_same(a: KeptRouters, b: KeptRouters, router: str, part: str) -> bool:
    if a.digest(router, "weight") is None or b.digest(router, "weight") is None:
        return False  # results from before digests
    return a.digest(router, part) == b.digest(router, part)


def _is_whole(row: Row) -> bool:
    return row["variant"] == "as_stored" and is_whole(row["population"])


def _array(values: Sequence[Any]) -> np.ndarray | None:
    if not values or any(value is None for value in values):
        return None
    array = np.array(values, dtype=np.float64)
    return array if np.isfinite(array).all() else None
