"""What happened to one router between two checkpoints, from its weights or from what results keep.

The rule, rows, gain, biases and experts; of results only 32 projections of each row are left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.core.router import EXPERT_SCALE, GroupMask, LogitMap, Norm, Router, Rule, Weights
from moegeom.core.row_keys import is_stored_whole
from moegeom.core.shapes import Float, Float64, Int64
from moegeom.core.text import percent
from moegeom.geometry.description import MatrixRegion, best_rows, best_run, row_bits, whole
from moegeom.geometry.rows import size
from moegeom.geometry.set_code import log2_sets
from moegeom.results.reader import ResultsView, finite_column
from moegeom.router.rule import groups_in_words, map_in_words
from moegeom.studies.changes.edit import EDITS, Edit, EditFit
from moegeom.studies.changes.operators.biases import CHANGED, rest_of
from moegeom.studies.changes.operators.matrices import FOLDED, NOT_FOLLOWED
from moegeom.studies.changes.operators.other_routers import UNRELATED
from moegeom.studies.changes.operators.parts import PART
from moegeom.studies.changes.operators.rounding import ROUNDED, rounding_of_broken
from moegeom.studies.changes.operators.rows import NOT_COMPARED
from moegeom.studies.changes.record import Change, RouterChange
from moegeom.studies.changes.row_pair import (
    KINDS,
    Biases,
    BiasPair,
    OtherRows,
    RoutersOfA,
    RowPair,
    held_bits,
    row_pair,
    stored_bits,
)
from moegeom.studies.faults.scope import listed

#: Biases of other routers by name.
OtherBiases = Mapping[str, Float[np.ndarray, "experts"]]


def compare_routers(a: Router, b: Router, others: RoutersOfA | None = None) -> RouterChange:
    """All edits that lead from router ``a`` to router ``b``.

    ``others`` are all routers of A, which b may be another one of. Routers of different shape,
    unless rows were left out or repeated, or with values that are not finite, are not compared
    unless they are equal.
    """
    place, rows = _rows(a, b, others)
    if place is None:
        return RouterChange(a.name, tuple(rows), tuple(_beside(a, b)))
    biases = (
        change
        for kind in KINDS
        for change in bias_changes(
            kind, Biases.of(a), Biases.of(b), place, others.biases(kind, a.name) if others else {}
        )
    )
    moved: list[float] = []
    if _is_finite(a) and _is_finite(b):
        moved = row_pair(a, b, place).row_sizes(b.rule.is_affine).tolist()
    parts = part_changes(a, b, place)
    changes, notes = (*rows, *biases, *parts), tuple(_beside(a, b))
    return RouterChange(a.name, changes, notes, place.tolist(), moved)


def _rows(
    a: Router, b: Router, others: RoutersOfA | None
) -> tuple[Int64[np.ndarray, "experts"] | None, list[Change]]:
    """The row of A behind each row of B, and the edits; None for shapes that do not match."""
    own = np.arange(b.num_experts)
    is_of_shape = a.weight.shape == b.weight.shape
    if is_of_shape and is_same(a.weight, b.weight) and is_same(a.gain, b.gain):
        return own, []
    if not (_is_finite(a) and _is_finite(b)):
        if is_of_shape:
            for fit in rounding_of_broken(a, b):
                if fit.evidence["dtypes"]:
                    return own, [ROUNDED.change(b.rule, dataclasses.replace(fit, size=None))]
        return own, [NOT_COMPARED.change(b.rule, kind="values that are not finite")]
    changes: list[Change] = []
    if not is_of_shape:
        fits = [(edit, *one) for edit in EDITS.all() for one in edit.fit_places(a, b)]
        if not fits:
            kind = f"{shape_text(a)} in A, {shape_text(b)} in B"
            return None, [NOT_COMPARED.change(b.rule, kind=kind)]
        edit, own, fit = min(fits, key=lambda one: one[2].bits)
        changes.append(edit.change(b.rule, fit))
    pair = row_pair(a, b, own, None if others is None else others.beside(b))
    row_changes, pair = explained(pair)
    return pair.place, [*changes, *row_changes]


def bias_changes(
    kind: str, a: Biases, b: Biases, place: Int64[np.ndarray, "experts"], others: OtherBiases
) -> Iterator[Change]:
    """Changes of one kind of bias; none where one side has no such bias.

    Bias ``place[i]`` of ``a`` is compared with bias i of ``b``: it belongs to the row.
    """
    before, after = a.values.get(kind), b.values.get(kind)
    if before is None or after is None or len(after) != len(place):
        return
    if np.array_equal(before[place], after, equal_nan=True):
        return
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        yield NOT_COMPARED.change(b.rule, kind=f"{kind} that is not finite", subject=kind)
        return
    stored = before.astype(np.float64)
    yield from explained_biases(
        BiasPair(
            kind, stored[place], after.astype(np.float64), b.rule, stored, place, b.dtype, others
        )
    )


def _beside(a: Router, b: Router) -> Iterator[str]:
    """Notes on the router that are no changes."""
    if (a.gain is None) != (b.gain is None):
        yield f"no gain known in {'A' if a.gain is None else 'B'}"
    elif not is_same(a.gain, b.gain):
        yield "gain different"
    elif a.gain is not None:
        yield "gain equal"
    stored = [r.provenance.stored_dtype.lower() for r in (a, b)]
    if stored[0] != stored[1]:
        yield f"stored {stored[0]} in A, {stored[1]} in B"


def is_same(a: Float[np.ndarray, "*size"] | None, b: Float[np.ndarray, "*other"] | None) -> bool:
    """True for equal values, whatever they are stored as, or when neither is there."""
    if a is None or b is None:
        return a is b
    return np.array_equal(a, b, equal_nan=True)


def _is_finite(router: Router) -> bool:
    parts = (router.weight, router.gain)
    return all(part is None or bool(np.isfinite(part).all()) for part in parts)


def shape_text(router: Router) -> str:
    """``8 x 64``: experts and hidden size."""
    return f"{router.num_experts} x {router.hidden_size}"


#: Bits that an edit has to save, and what it may leave of the distance where it applies.
_LEAST_BITS, _LEAVES = 50.0, 0.5

#: Edits that are found one after the other.
_MOST = 3

#: Bits of a bias that is told to the last digit, and those that an edit of biases has to save.
_EXACT, _LEAST_BIAS_BITS = 2.0**-30, 10.0


@dataclass(frozen=True, eq=False)
class _FittedEdit:
    edit: Edit
    fit: EditFit
    region: MatrixRegion
    saved: float

    @property
    def where(self) -> str:
        """``rows 3-7 (5 of 32)``, or the run of columns; empty for all."""
        region = self.region
        if region.is_whole or not self.fit.allows_subset:
            return ""
        if not region.rows.all():
            rows = np.flatnonzero(region.rows)
            name = "row" if len(rows) == 1 else "rows"
            return f"{name} {listed(rows)} ({len(rows)} of {len(region.rows)})"
        columns = np.flatnonzero(region.columns)
        return f"columns {columns[0]}-{columns[-1]} of {len(region.columns)}"


def explained(pair: RowPair) -> tuple[list[Change], RowPair]:
    """The edits of the rows, and the pair with these edits applied to A."""
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
    changes = [
        one.edit.change(pair.rule, one.fit, one.where, bits=one.saved, is_exact=is_exact)
        for one in edits
    ]
    shift = [edit.change(pair.rule, fit) for edit in EDITS.all() for fit in edit.of_rest(pair)]
    if any(one.word == UNRELATED.name and one.phrase == UNRELATED.name for one in shift):
        # of another router nothing else is worth telling
        return [one for one in (*changes, *shift) if one.word in _BESIDE_ANOTHER], pair
    return [*changes, *shift], pair


#: What is worth telling beside rows of another router.
_BESIDE_ANOTHER = frozenset({UNRELATED.name, "rows copied", "another layer"})


def _applied(pair: RowPair, one: _FittedEdit) -> RowPair:
    fit, lengths = one.fit, pair.lengths
    if lengths is not None:  # true lengths of projected rows, scaled as their projections were
        before, after = (np.linalg.norm(rows, axis=1) for rows in (pair.a, fit.rows))
        lengths = lengths * np.divide(after, before, np.ones(len(after)), where=before > 0.0)
    return dataclasses.replace(
        pair,
        a=np.where(one.region.inside, fit.rows, pair.a),
        half_step=pair.half_step * fit.steps,
        place=pair.place if fit.place is None else fit.place,
        lengths=lengths,
        named=(*pair.named, one.edit.name),
        is_stored=pair.is_stored and fit.is_stored,
    )


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
                run, _ = _best_columns(pair, left)
                # in the currency of rows: what is left of each, its columns in the run edited
                mixed = np.linalg.norm(np.where(run.columns, left, pair.left), axis=1)
                of_run = row_bits(before, mixed, pair.finest, dimension).sum() - run.bits
                ways = [best_rows(of_rows, dimension), (run, float(of_run))]
            region, saved = max(ways, key=lambda way: way[1])
            inside = np.ix_(region.rows, region.columns)
            is_of_rows = region.columns.all()  # then beside the rows of B as well
            was = (
                float(np.linalg.norm(base[region.rows])) if is_of_rows else size(pair.left[inside])
            )
            if saved - fit.bits >= _LEAST_BITS and size(left[inside]) <= _LEAVES * was:
                yield _FittedEdit(edit, fit, region, saved - fit.bits)


def _best_columns(
    pair: RowPair, left: Float64[np.ndarray, "experts dimension"]
) -> tuple[MatrixRegion, float]:
    finest = 0.6 * np.linalg.norm(pair.half_step, axis=0)
    before, after = (np.linalg.norm(x, axis=0) for x in (pair.left, left))
    return best_run(row_bits(before, after, finest, len(left)), len(left))


# ------------------------------------------------------------------------------------------- biases
def explained_biases(pair: BiasPair) -> list[Change]:
    """The edits of the biases of one kind; empty where they are equal."""
    changes: list[Change] = []
    while np.abs(pair.b - pair.a).max() > (pair.finest if changes else 0.0):
        proposals = _bias_proposals(pair) if len(changes) < _MOST else ()
        best = max(proposals, key=lambda one: one[0], default=None)
        if best is None:
            return [*changes, CHANGED.change(pair.rule, rest_of(pair), subject=pair.kind)]
        _, edit, fit = best
        changes.append(edit.change(pair.rule, fit, subject=pair.kind))
        pair = dataclasses.replace(pair, a=fit.rows, named=(*pair.named, edit.name))
    return changes


def part_changes(a: Router, b: Router, place: Int64[np.ndarray, "experts"]) -> Iterator[Change]:
    """Parts that are not the same numbers; scales of experts belong to the rows at ``place``.

    What can be done to a bias can be done to any numbers, in the order in which they are stored.
    """
    before, after = a.other_parts, b.other_parts
    for name in {**before, **after}:
        one, other = before.get(name), after.get(name)
        if one is None or other is None:
            there = "is in B alone" if one is None else "is not in B"
            yield PART.change(b.rule, kind=f"{name} {there}", subject=name)
            continue
        is_of_experts = name == EXPERT_SCALE and len(one) == a.num_experts
        rows = place if is_of_experts else np.arange(len(one))
        if one[rows].shape == other.shape and np.array_equal(one[rows], other, equal_nan=True):
            continue
        if one[rows].shape != other.shape:
            yield PART.change(b.rule, kind=f"{name} of another shape", subject=name)
        elif not (np.isfinite(one).all() and np.isfinite(other).all()):
            yield PART.change(b.rule, kind=f"{name} not finite", subject=name)
        else:
            numbers = rows if one.ndim == 1 else np.arange(one.size)
            stored = one.ravel().astype(np.float64)
            unit = "expert" if is_of_experts else "number"
            pair = BiasPair(
                *(name, stored[numbers], other.ravel().astype(np.float64), b.rule, stored, numbers),
                dtype=_DTYPES[min(held_bits(one), held_bits(other))],
                unit=unit,
            )
            for change in explained_biases(pair):
                words = {"kind": change.phrase, "subject": name, "detail": change.detail}
                yield PART.change(b.rule, **words, **change.evidence)


#: Dtypes by the mantissa bits that numbers need.
_DTYPES = {7: "BF16", 10: "F16", 23: "F32"}


def _bias_proposals(pair: BiasPair) -> Iterator[tuple[float, Edit, EditFit]]:
    before = float(np.linalg.norm(pair.b - pair.a))
    scale = float(np.linalg.norm(pair.b)) + float(np.linalg.norm(pair.a))
    for edit in EDITS.all():
        if edit.name in pair.named:
            continue
        for every in edit.fit_bias(pair):
            fit = _of_moved(pair, every) if every.allows_subset else every
            left = float(np.linalg.norm(pair.b - fit.rows))
            after = max(left, _EXACT * scale)
            is_enough = float(np.abs(pair.b - fit.rows).max()) <= pair.finest
            saved = len(pair.b) * float(np.log2(before / after)) - fit.bits if before else 0.0
            if saved >= _LEAST_BIAS_BITS and (is_enough or left <= _LEAVES * before):
                yield saved, edit, fit


def _of_moved(pair: BiasPair, fit: EditFit) -> EditFit:
    """The edit of those numbers alone that changed, where others should have."""
    moved, number = pair.b != pair.a, len(pair.a)
    if not (np.abs(fit.rows - pair.a)[~moved] > pair.finest).any():
        return fit
    places = np.flatnonzero(moved)
    name = f"{pair.unit}s" if len(places) > 1 else pair.unit
    return dataclasses.replace(
        fit,
        rows=np.where(moved, fit.rows, pair.a),
        bits=fit.bits + log2_sets(number, len(places)),
        kind=f"{fit.kind}, {name} {listed(places)} ({len(places)} of {number})",
    )


#: What the fields of a rule and of its weights are called, in the order in which they are told.
_NAMES = {
    "top_k": "experts chosen",
    "score": "score",
    "has_selection_bias": "selection bias",
    "has_logit_bias": "logit bias",
    "groups": "groups",
    "logit_map": "map of the logits",
    "capacity": "expert capacity",
    "pick": "experts picked by",
    "source": "weights from",
    "renormalise": "weights divided by their sum",
    "epsilon": "added to that sum",
    "floor": "least sum",
    "power": "power inside the sum",
    "scale": "factor of the weights",
    "jitter": "jitter of the weights",
}


#: What guards the sum of the weights against 0, up to these numbers: of chosen experts the sum is
#: larger by far, and formats of files have guards of their own.
_GUARDS = {"epsilon": 1e-6, "floor": 1e-4}


def rule_differences(a: Rule, b: Rule) -> list[str]:
    """``experts chosen 3 in A, 4 in B`` for every step that is not the same; empty when all are.

    Numbers are the same where float32 does not tell them apart, and so are guards against a sum of
    0: a format may keep its settings in float32 and have another guard.
    """
    first, second = _steps(a), _steps(b)
    differences = []
    for step, name in _NAMES.items():
        one, other = first[step], second[step]
        is_same = one == other
        if isinstance(one, float) and isinstance(other, float):
            is_same = _is_same_number(one, other) or max(one, other) <= _GUARDS.get(step, 0.0)
        if not is_same:
            differences.append(f"{name} {_step_text(one)} in A, {_step_text(other)} in B")
    return differences


def is_same_norm(a: Norm | None, b: Norm | None) -> bool:
    """Whether kind and epsilon are the same; the offset with which a gain is stored may differ."""
    if a is None or b is None:
        return a is b
    return a.kind == b.kind and _is_same_number(a.eps, b.eps)


def _is_same_number(a: float, b: float) -> bool:
    """Whether the two are equal as float32."""
    return bool(np.float32(a) == np.float32(b))


def _steps(rule: Rule) -> dict[str, Any]:
    """The fields of a rule and of its weights, by name."""
    fields = [
        (part, field.name) for part in (rule, rule.weights) for field in dataclasses.fields(part)
    ]
    return {name: getattr(part, name) for part, name in fields}


def _step_text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, GroupMask):
        return f"{groups_in_words(value)} by {value.score.replace('_', ' ')}"
    if isinstance(value, LogitMap):
        return map_in_words(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value).replace("_", " ")


Row = Mapping[str, Any]

_UNKNOWN = "whether the experts moved along is not in results: compare the checkpoints, --experts"

#: Projected rows that differ by less than this are the same but for rounding to bfloat16.
_FOLDED = 2.0**-8


@dataclass(frozen=True, eq=False)
class ProjectedRouter:
    """A router without its weights, from results or from a baseline.

    ``rule`` is known as far as the meaning of a change depends on it; ``shape`` are experts and
    hidden size. ``digests`` are hashes of ``weight``, ``gain`` and ``parts`` (what is neither these
    nor a bias), without what is not there.
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
    layers = {row["router"]: row for row in results.rows("layers") if is_stored_whole(row)}
    experts: dict[str, list[Row]] = {}
    for row in filter(is_stored_whole, results.rows("experts")):
        experts.setdefault(row["router"], []).append(row)
    return {
        facts["name"]: _projected(
            facts, layers.get(facts["name"], {}), experts.get(facts["name"], ())
        )
        for facts in results.run["routers"]
    }


def _projected(facts: Mapping[str, Any], layer: Row, experts: Sequence[Row]) -> ProjectedRouter:
    rule, half_step = rule_of(facts), None
    rows = finite_column(experts, "row_projections")
    mean = finite_column([layer], "mean_row_projections")
    if rows is None or mean is None:
        rows = None
    else:
        rows = rows + mean[0]
        step = 2.0 ** -(stored_bits(facts["stored_dtype"]) + 1)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True) / np.sqrt(rows.shape[1])
        half_step = np.ones_like(rows) * lengths * step
    digests = {part: layer.get(f"{part}_digest") for part in ("weight", "gain", "parts")}
    biases = {kind: finite_column(experts, kind.replace(" ", "_")) for kind in KINDS}
    return ProjectedRouter(
        facts["name"],
        rule,
        (facts["num_experts"], facts["hidden_size"]),
        {part: digest for part, digest in digests.items() if digest is not None},
        Biases(biases, facts["bias_dtype"], rule),
        rows,
        half_step,
        finite_column(experts, "centred_row_norm"),
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


def compare_projected(a: ProjectedRouters, b: ProjectedRouters, router: str) -> RouterChange:
    """The change of one router.

    Equal weights and gains are exact; all else is approximate. Distances from 32 projections are
    true to 12 %. A fold of the gain shows as no change; a cast, a rotation, an update of low rank
    and factors for columns have no pattern.
    """
    before, after = a[router], b[router]
    own = np.arange(after.shape[0])
    if before.shape != after.shape:
        shapes = "{} x {} in A, {} x {} in B".format(*before.shape, *after.shape)
        return RouterChange(router, (NOT_COMPARED.change(after.rule, kind=shapes),))
    is_known = "weight" in before.digests and "weight" in after.digests  # else older results
    is_same = {
        part: is_known and before.digests.get(part) == after.digests.get(part)
        for part in ("weight", "gain")
    }
    beside = ("gain equal" if is_same["gain"] else "gain different",)
    if "gain" not in before.digests and "gain" not in after.digests:
        beside = ()
    if all(is_same.values()):
        changes, moved = tuple(_biases(a, b, router, own)), [0.0] * len(own)
        return RouterChange(router, changes, (), own.tolist(), moved)
    pair = _pair(a, b, router)
    if pair is None:
        kind = "no projections of its rows are known"
        return RouterChange(router, (NOT_COMPARED.change(after.rule, kind=kind),), beside)
    rows, left = _projected_rows(pair, **is_same)
    place = left.place
    changes = (*rows, *_biases(a, b, router, place))
    notes = (_UNKNOWN,) if (place != own).any() else ()
    lengths = None if pair.lengths is None else pair.lengths[place]
    aligned = dataclasses.replace(pair, a=pair.a[place], place=place, lengths=lengths)
    moved, size = aligned.row_sizes(after.rule.is_affine).tolist(), aligned.change_size
    return RouterChange(router, changes, (*beside, *notes), place.tolist(), moved, size)


def _biases(
    a: ProjectedRouters, b: ProjectedRouters, router: str, place: np.ndarray
) -> Iterator[Change]:
    digests = [one[router].digests.get("parts") for one in (a, b)]
    if None not in digests and digests[0] != digests[1]:
        kind = "scales, gate of shared experts or projection changed"
        yield PART.change(b[router].rule, kind=kind, subject="parts")
    for kind in KINDS:
        others = {
            name: values
            for name, one in a.items()
            if name != router and (values := one.biases.values.get(kind)) is not None
        }
        yield from bias_changes(kind, a[router].biases, b[router].biases, place, others)


def _projected_rows(pair: RowPair, *, weight: bool, gain: bool) -> tuple[list[Change], RowPair]:
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
