"""Whether a router is the same function after the export: every edit has a judge.

B's router may differ from A's by what writing it once more in A's own precision leaves, and by
nothing else. A fold of a smoothing scale and a rotation must write it again; that rounding is
stated. A cast or a quantisation throws digits away that A has, and quantisers are meant to leave
routers alone, so they fail however small they look: how many tokens they move only text tells.
What is the same function by the rule itself passes, such as a common shift of all logits in front
of a softmax. Renumbered experts are inconclusive: nothing here reads the experts, which must have
moved along.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Int64
from moegeom.studies.changes.edit import EDITS, EndState, Exported, Judgement
from moegeom.studies.changes.operators import rotation
from moegeom.studies.changes.operators.gains import FOLDED
from moegeom.studies.changes.operators.places import NOT_COMPARED
from moegeom.studies.changes.operators.rows import PERMUTED
from moegeom.studies.changes.operators.subset import PRUNED
from moegeom.studies.changes.others import RoutersOfA
from moegeom.studies.changes.record import Change, RouterChange
from moegeom.studies.changes.router import compare_routers, is_same
from moegeom.studies.signoff.record import LineState

#: Worst first.
STATES: tuple[LineState, ...] = ("failed", "inconclusive", "not judged", "passed")

#: The word for rows that turned as a whole.
ROTATED = rotation.ROTATED.name

#: Words for what must move the other numbers of a router as well.
_MOVING = frozenset({FOLDED.name, ROTATED, PERMUTED.name, PRUNED.name})


@dataclass(frozen=True, eq=False)
class JudgedRouter:
    """One router of both sides: a judgement for each change, and for other unequal parts.

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
        states = {one.state for one in (*(j for _, j in self.changes), *self.others)}
        if "failed" in states:
            return "failed"
        return "inconclusive" if "inconclusive" in states else "passed"

    @property
    def is_identical(self) -> bool:
        """True when all numbers are the same."""
        return not self.changes and not self.others

    @property
    def is_permuted(self) -> bool:
        return any(change.word in (PERMUTED.name, PRUNED.name) for change, _ in self.changes)

    @property
    def rotation(self) -> tuple[Change, Judgement] | None:
        """The rotation that was found, and how it ends."""
        return next((pair for pair in self.changes if pair[0].word == ROTATED), None)


def judge(a: Router, b: Router, others: RoutersOfA | None = None) -> JudgedRouter:
    """What happened to one router, and whether it is the same function.

    ``others`` are all routers of A.
    """
    comparison = compare_routers(a, b, None, others)
    place = np.array(comparison.place or range(b.num_experts), np.int64)
    pair = Exported(a, b, place)
    changes = tuple((one, EDITS[one.word].judge(one, pair)) for one in comparison.changes)
    return JudgedRouter(a.name, changes, tuple(_others(comparison, pair)), place, comparison.beside)


def _others(comparison: RouterChange, pair: Exported) -> Iterator[Judgement]:
    """Judgements of unequal parts that are neither rows, gain nor biases.

    What a fold, a rotation or another order must change as well is not judged where there was one.
    """
    words = {one.word for one in comparison.changes}
    if NOT_COMPARED.name in words:
        return
    a, b = pair.a, pair.b
    if not (np.isfinite(a.weight).all() and np.isfinite(b.weight).all()):
        yield Judgement("failed", "holds values that are not finite, as in A.")
    scale = None if a.expert_scale is None else a.expert_scale[pair.place]
    cosines = [None if r.projection is None else r.projection.scale for r in (a, b)]
    follows: EndState = "inconclusive" if words & _MOVING else "failed"
    verdicts: dict[str, tuple[bool, EndState]] = {
        "scale of the experts": (is_same(scale, b.expert_scale), "failed"),
        "scale of the cosines": (cosines[0] == cosines[1], "failed"),
        "bias of the norm in front": (is_same(a.norm_bias, b.norm_bias), follows),
        "rows of the shared experts": (is_same(a.shared_rows, b.shared_rows), follows),
    }
    for name, (same, state) in verdicts.items():
        if not same:
            unknown = ", as the rows did; the two are not compared" if state != "failed" else ""
            yield Judgement(state, f"the {name} changed{unknown}.")
