"""Changes of a router of which only results exist, from 32 projections of each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.core.router import GroupMask, Rule, Weights
from moegeom.core.row_keys import is_whole
from moegeom.core.shapes import Float64
from moegeom.core.text import percent
from moegeom.results.reader import ResultsView
from moegeom.studies.changes.operators.factors import FOLDED, NOT_FOLLOWED
from moegeom.studies.changes.operators.rows import NOT_COMPARED
from moegeom.studies.changes.record import Change, RouterChange
from moegeom.studies.changes.router import bias_changes, explained
from moegeom.studies.changes.row_pair import KINDS, Biases, OtherRows, RowPair, stored_bits

Row = Mapping[str, Any]

_UNKNOWN = "whether the experts moved along is not in results: compare the checkpoints, --experts"

#: Projected rows that differ by less than this are the same but for rounding to bfloat16.
_FOLDED = 2.0**-8


@dataclass(frozen=True, eq=False)
class ProjectedRouter:
    """A router without its weights, from results or from a baseline.

    ``rule`` is known as far as the meaning of a change depends on it; ``shape`` are experts and
    hidden size. ``digests`` are hashes of ``weight`` and ``gain``, without what is not there.
    ``projections`` are those of the effective rows, means included, ``half_step`` the largest
    rounding error of each as it was stored, ``lengths`` the true ones of the centred rows; None
    where they were not measured.
    """

    name: str
    rule: Rule
    shape: tuple[int, int]
    digests: Mapping[str, str]
    biases: Biases
    projections: Float64[np.ndarray, "experts count"] | None
    half_step: Float64[np.ndarray, "experts count"] | None
    lengths: Float64[np.ndarray, "experts"] | None


#: Routers by name, in the order of the checkpoint.
ProjectedRouters = Mapping[str, ProjectedRouter]


def projected_routers(results: ResultsView) -> ProjectedRouters:
    """The routers of results, with what these keep of the rows."""
    layers = {row["router"]: row for row in results.rows("layers") if _is_whole(row)}
    experts: dict[str, list[Row]] = {}
    for row in filter(_is_whole, results.rows("experts")):
        experts.setdefault(row["router"], []).append(row)
    return {
        facts["name"]: _projected(
            facts, layers.get(facts["name"], {}), experts.get(facts["name"], ())
        )
        for facts in results.run["routers"]
    }


def _projected(facts: Mapping[str, Any], layer: Row, experts: Sequence[Row]) -> ProjectedRouter:
    rule, half_step = rule_of(facts), None
    rows, mean = _column(experts, "row_projections"), _column([layer], "mean_row_projections")
    if rows is None or mean is None:
        rows = None
    else:
        rows = rows + mean[0]
        step = 2.0 ** -(stored_bits(facts["stored_dtype"]) + 1)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True) / np.sqrt(rows.shape[1])
        half_step = np.ones_like(rows) * lengths * step
    digests = {part: layer.get(f"{part}_digest") for part in ("weight", "gain")}
    biases = {kind: _column(experts, kind.replace(" ", "_")) for kind in KINDS}
    return ProjectedRouter(
        facts["name"],
        rule,
        (facts["num_experts"], facts["hidden_size"]),
        {part: digest for part, digest in digests.items() if digest is not None},
        Biases(biases, facts["bias_dtype"], rule),
        rows,
        half_step,
        _column(experts, "centred_row_norm"),
    )


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
    a: ProjectedRouters, b: ProjectedRouters, router: str
) -> tuple[RouterChange, RowPair | None]:
    """The change of one router, and its projected rows in the order of B where there are any.

    Equal weights and gains are exact; all else is approximate. Distances from 32 projections are
    true to 12 %. A fold of the gain shows as no change; a cast, a rotation, an update of low rank
    and factors for columns have no pattern.
    """
    before, after = a[router], b[router]
    own = np.arange(after.shape[0])
    if before.shape != after.shape:
        shapes = "{} x {} in A, {} x {} in B".format(*before.shape, *after.shape)
        return RouterChange(router, (NOT_COMPARED.change(after.rule, kind=shapes),)), None
    is_known = "weight" in before.digests and "weight" in after.digests  # else older results
    is_same = {
        part: is_known and before.digests.get(part) == after.digests.get(part)
        for part in ("weight", "gain")
    }
    beside = ("gain equal" if is_same["gain"] else "gain different",)
    if "gain" not in before.digests and "gain" not in after.digests:
        beside = ()
    if all(is_same.values()):
        return RouterChange(router, tuple(_biases(a, b, router, own)), (), own.tolist()), None
    pair = _pair(a, b, router)
    if pair is None:
        kind = "no projections of its rows are known"
        return RouterChange(router, (NOT_COMPARED.change(after.rule, kind=kind),), beside), None
    rows, left = _rows(pair, **is_same)
    place = left.place
    changes = (*rows, *_biases(a, b, router, place))
    notes = (_UNKNOWN,) if (place != own).any() else ()
    lengths = None if pair.lengths is None else pair.lengths[place]
    aligned = dataclasses.replace(pair, a=pair.a[place], place=place, lengths=lengths)
    return RouterChange(router, changes, (*beside, *notes), place.tolist()), aligned


def _biases(
    a: ProjectedRouters, b: ProjectedRouters, router: str, place: np.ndarray
) -> Iterator[Change]:
    for kind in KINDS:
        others = {
            name: values
            for name, one in a.items()
            if name != router and (values := one.biases.values.get(kind)) is not None
        }
        yield from bias_changes(kind, a[router].biases, b[router].biases, place, others)


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


def _pair(a: ProjectedRouters, b: ProjectedRouters, router: str) -> RowPair | None:
    before, after = a[router], b[router]
    rows, steps = (before.projections, after.projections), (before.half_step, after.half_step)
    if rows[0] is None or rows[1] is None or steps[0] is None or steps[1] is None:
        return None
    every = {name: one.projections for name, one in a.items() if one.projections is not None}
    others = OtherRows(lambda: every, lambda name: {"": every[name]})
    return RowPair(
        rows[0],
        rows[1],
        steps[0] + steps[1],
        after.rule,
        np.arange(len(rows[0])),
        name=router,
        others=others,
        lengths=before.lengths,
        new_lengths=after.lengths,
    )


def _is_whole(row: Row) -> bool:
    return row["variant"] == "as_stored" and is_whole(row["population"])


def _column(rows: Sequence[Row], name: str) -> np.ndarray | None:
    """A column as an array; None unless every row has it, and finite."""
    values = [row.get(name) for row in rows]
    if not values or any(value is None for value in values):
        return None
    array = np.array(values, dtype=np.float64)
    return array if np.isfinite(array).all() else None
