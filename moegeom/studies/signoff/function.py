"""Second and third line of a sign-off: is a router the same function, and is it so up to rotation?

Every edit has a judge.

B's router may differ from A's by what writing it once more in A's own precision leaves, and by
nothing else. A fold of a smoothing scale and a rotation must write it again; that rounding is
stated. A cast or a quantisation throws digits away that A has, and quantisers are meant to leave
routers alone, so they fail however small they look: how many tokens they move only text tells.
What is the same function by the rule itself passes, such as a common shift of all logits in front
of a softmax. Renumbered experts are inconclusive: nothing here reads the experts, which must have
moved along.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Int64
from moegeom.core.text import all_of
from moegeom.studies.changes.edit import EDITS, EndState, Exported, Judgement
from moegeom.studies.changes.operators.matrices import FOLDED, ROTATED
from moegeom.studies.changes.operators.rows import NOT_COMPARED, PERMUTED, PRUNED
from moegeom.studies.changes.record import Change, RouterChange, phrase_of, where
from moegeom.studies.changes.router import compare_routers, is_same
from moegeom.studies.changes.row_pair import RoutersOfA
from moegeom.studies.signoff.record import STATES, Line, LineState

#: Words for what must move the other numbers of a router as well.
_MOVING = frozenset({FOLDED.name, ROTATED.name, PERMUTED.name, PRUNED.name})


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
        states = {one.state for one in (*(verdict for _, verdict in self.changes), *self.others)}
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
    def have_rows_failed(self) -> bool:
        return any(j.state == "failed" and one.subject == "rows" for one, j in self.changes)

    @property
    def rotation(self) -> tuple[Change, Judgement] | None:
        """The rotation that was found, and how it ends."""
        return next((pair for pair in self.changes if pair[0].word == ROTATED.name), None)


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


_NOTHING_IN_COMMON = "the two have no router in common."


def router_line(judged: Sequence[JudgedRouter], names: Sequence[str]) -> Line:
    """The worst state of all routers and what happened to them; ``names`` are all routers of A."""
    if not judged:
        return Line("effective router", "failed", _NOTHING_IN_COMMON)
    same = sum(one.is_identical for one in judged)
    phrases = []
    for group in _groups(judged):
        # what happened to all of a group, with the range of its sizes
        alike = zip(*([change for change, _ in one.changes] for one in group), strict=True)
        others = [other.why.removesuffix(".") for other in group[0].others]
        happened = " and ".join([*map(phrase_of, alike), *others])
        phrases.append(f"{where([one.name for one in group], names)} {happened}")
    if same == len(judged):
        # gains only where they are known on both sides
        has_gains = any("gain equal" in one.beside for one in judged)
        compared = "weights, gains and biases" if has_gains else "weights and biases"
        phrases = [f"{compared} are the same numbers in {all_of(same, 'router')}"]
    elif same:
        phrases.append(f"{same} of {len(judged)} routers are the same numbers")
    return Line(
        "effective router",
        next(state for state in STATES if any(one.state == state for one in judged)),
        f"{'; '.join(phrases)}.",
        tuple(_explained(judged, names)),
        (),
        {"routers": {one.name: _evidence(one) for one in judged}},
    )


def rotation_line(judged: Sequence[JudgedRouter], names: Sequence[str]) -> Line:
    """Whether a rotation, which keeps W diag(g)^2 W^T, explains the change of the rows."""
    if not judged:
        return Line("up to rotation", "inconclusive", _NOTHING_IN_COMMON)
    rotated = {one.name: one.rotation for one in judged if one.rotation is not None}
    noise = {name: float(change.evidence["gram_noise"]) for name, (change, _) in rotated.items()}
    moved = [one.name for one in judged if one.name not in rotated and one.have_rows_failed]
    parts, details = [], ()
    if rotated:
        worst = max(noise, key=noise.__getitem__)
        change, judgement = rotated[worst]
        most = f" (most: {where([worst], names)})" if len(rotated) > 1 else ""
        parts.append(f"{where([*rotated], names)}{most}: {judgement.why.removesuffix('.')}")
        details = (change.meaning,) if judgement.state == "passed" else ()
    if moved:
        parts.append(f"no rotation explains what happened to {where(moved, names)}")
    has_failed = moved or any(judgement.state == "failed" for _, judgement in rotated.values())
    have_moved = any(one.is_permuted for one in judged)
    places = "changed places and did not turn" if have_moved else "are where they were"
    sentence = "; ".join(parts) or f"not needed, rows {places}"
    state = "failed" if has_failed else "passed"
    return Line("up to rotation", state, f"{sentence}.", details, (), {"gram_noise": noise})


def _groups(judged: Sequence[JudgedRouter]) -> list[list[JudgedRouter]]:
    """Routers grouped by their changes, identical ones left out; the worst first."""
    groups: dict[tuple[str, ...], list[JudgedRouter]] = {}
    for one in judged:
        if not one.is_identical:
            phrases = (change.phrase for change, _ in one.changes)
            texts = (other.why for other in one.others)
            groups.setdefault((one.state, *phrases, *texts), []).append(one)
    return sorted(groups.values(), key=lambda group: (STATES.index(group[0].state), -len(group)))


def _explained(judged: Sequence[JudgedRouter], names: Sequence[str]) -> Iterator[str]:
    """Each word once for each state, worst first: the largest change, and what it means."""
    seen: set[tuple[str, str]] = {(ROTATED.name, state) for state in STATES}
    entries = [(change, verdict, one.name) for one in judged for change, verdict in one.changes]
    entries.sort(key=lambda entry: (STATES.index(entry[1].state), -(entry[0].size or 0.0)))
    for change, verdict, name in entries:
        if (change.word, verdict.state) not in seen:
            seen.add((change.word, verdict.state))
            begin = f"{'In' if change.size is None else 'Most in'} {where([name], names)}"
            detail = f" {begin}: {change.detail}." if change.detail else ""
            yield f"{change.word}: {verdict.why}{detail}"
    if any(one.rotation is not None for one in judged):
        yield "rotated: judged in the next line."


def _evidence(one: JudgedRouter) -> dict[str, Any]:
    changes = [
        {
            "word": change.word,
            "state": verdict.state,
            "said": verdict.why,
            "size": change.size,
            "detail": change.detail,
            "evidence": change.evidence,
        }
        for change, verdict in one.changes
    ]
    others = [other.why for other in one.others]
    return {"state": one.state, "changes": changes, "others": others, "beside": one.beside}
