"""Is a router the same function after the export? Every word of the closed list has a judge.

B's router may differ from A's by what writing it once more in A's own precision leaves, and by
nothing else. A fold of a smoothing scale and a rotation must write it again; that rounding is
stated. A cast or a quantisation throws digits away that A has, and quantisers are meant to leave
routers alone, so they fail however small they look: how many tokens they move only text tells.
What is the same function by the rule itself passes, such as a common shift of all logits in front
of a softmax. Renumbered experts are inconclusive: nothing here reads the experts, which must have
moved along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

from moegeom.core.router import Router
from moegeom.geometry.rows import size
from moegeom.studies.changes.router import compare_routers
from moegeom.studies.changes.row_pair import row_pair
from moegeom.studies.diff.record import Change, RouterChange, percent
from moegeom.studies.signoff.record import LineState

#: Worst first.
STATES: tuple[LineState, ...] = ("failed", "inconclusive", "not judged", "passed")

#: The word for rows that turned as a whole.
ROTATED = "rotated"

#: Words for what must move the other numbers of a router as well.
_MOVING = frozenset({"gain folded", ROTATED, "permuted"})


@dataclass(frozen=True)
class Judgement:
    """How one thing that happened ends, and the sentence that says why."""

    state: LineState
    said: str


@dataclass(frozen=True, eq=False)
class JudgedRouter:
    """One router of both sides: a judgement for each change, and for what else is not the same.

    Row i of B was row ``place[i]`` of A.
    """

    name: str
    changes: tuple[tuple[Change, Judgement], ...]
    others: tuple[Judgement, ...]
    place: Int64[np.ndarray, "experts"]
    beside: tuple[str, ...] = ()

    @property
    def state(self) -> LineState:
        """The worst of all."""
        found = {one.state for one in (*(j for _, j in self.changes), *self.others)}
        if "failed" in found:
            return "failed"
        return "inconclusive" if "inconclusive" in found else "passed"

    @property
    def is_identical(self) -> bool:
        """True when all numbers are the same."""
        return not self.changes and not self.others

    @property
    def is_permuted(self) -> bool:
        return any(change.word == "permuted" for change, _ in self.changes)

    @property
    def rotation(self) -> tuple[Change, Judgement] | None:
        """The rotation that was found, and how it ends."""
        return next((pair for pair in self.changes if pair[0].word == ROTATED), None)


@dataclass(frozen=True, eq=False)
class Pair:
    """What a judge sees beside the change."""

    a: Router
    b: Router
    place: Int64[np.ndarray, "experts"]

    def own_rounding(self) -> float:
        """Largest share of its rows that writing A once more in its own precision can move."""
        own = row_pair(self.a, self.a, np.arange(self.a.num_experts))
        length = size(own.a + own.mean_a)
        # the pair bounds the rounding of both of its sides
        return 0.5 * size(own.half_step) / length if length > 0.0 else 0.0

    def moved(self) -> float:
        """By how much the rows moved, beside a common vector, as a share of whole rows."""
        with np.errstate(invalid="ignore", over="ignore"):  # casts are told of infinities too
            rows = row_pair(self.a, self.b, self.place)
            length = size(rows.a + rows.mean_a)
            return size(rows.b - rows.a) / length if length > 0.0 else 0.0


Judge = Callable[[Change, Pair], Judgement]


def _always(state: LineState) -> Judge:
    return lambda change, pair: Judgement(state, change.meaning)


def _rounded(change: Change, pair: Pair) -> Judgement:
    moved = pair.moved()
    said = f"W diag(g) moved by {percent(moved)}; " if 0.0 < moved < np.inf else ""
    return Judgement("failed", f"{said}{change.meaning}")


def _folded(change: Change, pair: Pair) -> Judgement:
    moved, allowed = pair.moved(), pair.own_rounding()
    begin = "gain and columns changed inversely"
    if moved <= allowed:
        rounding = f"a rounding of {percent(moved)} (A's own precision: {percent(allowed)})"
        return Judgement("passed", f"{begin}, W diag(g) is the same up to {rounding}.")
    return Judgement(
        "failed",
        f"{begin}, and W diag(g) moved by {percent(moved)}; writing it again in A's own precision "
        f"leaves at most {percent(allowed)}: digits were lost.",
    )


def _rotated(change: Change, pair: Pair) -> Judgement:
    noise, allowed = float(change.evidence["gram_noise"]), pair.own_rounding()
    told = f"W diag(g)^2 W^T changed as noise of {percent(noise)} on the rows would change it"
    if noise <= allowed:
        return Judgement("passed", f"{told} (A's own precision: {percent(allowed)}).")
    return Judgement(
        "failed", f"{told}; A's own precision leaves {percent(allowed)}: digits were lost."
    )


def _permuted(change: Change, pair: Pair) -> Judgement:
    if change.evidence["mixes_groups"]:
        mixed = "the new order mixes groups of the rule: choices change in any case."
        return Judgement("failed", mixed)
    return Judgement("inconclusive", f"{change.meaning.removesuffix('.')}; experts are not read.")


def _shifted_logits(change: Change, pair: Pair) -> Judgement:
    """Softmax scores are the same; any other score moves, and routing weights with it."""
    rule = pair.b.rule
    is_capped = rule.logit_map is not None and np.isfinite(rule.logit_map.soft_cap)
    is_same_function = rule.score == "softmax" and not is_capped
    return Judgement("passed" if is_same_function else "failed", change.meaning)


def _shifted_bias(change: Change, pair: Pair) -> Judgement:
    """Routing weights are scores without the bias; only a filled mask is compared with it."""
    groups = pair.b.rule.groups
    is_compared = groups is not None and groups.fill != -np.inf
    return Judgement("failed" if is_compared else "passed", change.meaning)


#: How each word of ``change_words`` ends; a router ends as the worst of its words.
JUDGES: Mapping[str, Judge] = {
    "rounded": _rounded,
    "gain folded": _folded,
    "gain not compensated": _always("failed"),
    "columns scaled": _always("failed"),
    ROTATED: _rotated,
    "permuted": _permuted,
    "experts left behind": _always("failed"),
    "experts moved alone": _always("failed"),
    "scaled": _always("failed"),
    "rows scaled": _always("failed"),
    "rows copied": _always("failed"),
    "negated": _always("failed"),
    "common shift": _shifted_logits,
    "noise": _always("failed"),
    "another layer": _always("failed"),
    "unrelated": _always("failed"),
    "selection bias shifted": _shifted_bias,
    "logit bias shifted": _shifted_logits,
    "bias changed": _always("failed"),
    "bias left behind": _always("failed"),
    "not compared": _always("failed"),
}


def judge(a: Router, b: Router) -> JudgedRouter:
    """What happened to one router, and whether it is the same function."""
    found = compare_routers(a, b)
    places = (one.evidence["place"] for one in found.changes if one.word == "permuted")
    place = np.array(next(places, range(b.num_experts)), np.int64)
    pair = Pair(a, b, place)
    changes = tuple((one, JUDGES[one.word](one, pair)) for one in found.changes)
    return JudgedRouter(a.name, changes, tuple(_others(found, pair)), place, found.beside)


def _others(found: RouterChange, pair: Pair) -> Iterator[Judgement]:
    """Numbers that are neither rows, gain nor biases: the same, or told.

    What a fold, a rotation or another order must change as well is not judged where there was one.
    """
    words = {one.word for one in found.changes}
    if "not compared" in words:
        return
    a, b = pair.a, pair.b
    scale = None if a.expert_scale is None else a.expert_scale[pair.place]
    cosines = [None if r.projection is None else r.projection.scale for r in (a, b)]
    follows: LineState = "inconclusive" if words & _MOVING else "failed"
    told: dict[str, tuple[bool, LineState]] = {
        "scale of the experts": (_is_same(scale, b.expert_scale), "failed"),
        "scale of the cosines": (cosines[0] == cosines[1], "failed"),
        "bias of the norm in front": (_is_same(a.norm_bias, b.norm_bias), follows),
        "rows of the shared experts": (_is_same(a.shared_rows, b.shared_rows), follows),
    }
    for name, (same, state) in told.items():
        if not same:
            unknown = ", as the rows did; the two are not compared" if state != "failed" else ""
            yield Judgement(state, f"the {name} changed{unknown}.")


def _is_same(a: NDArray[np.floating] | None, b: NDArray[np.floating] | None) -> bool:
    if a is None or b is None:
        return a is b
    return np.array_equal(a, b, equal_nan=True)
