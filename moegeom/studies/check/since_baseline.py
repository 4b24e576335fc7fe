"""What happened to every router since the baseline: the edits of ``diff``, by projections."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float64

from moegeom.checks.baseline import Baseline
from moegeom.checks.drift import Drift, SinceBaseline
from moegeom.core.router import Rule
from moegeom.core.text import percent
from moegeom.results.reader import ResultsView
from moegeom.studies.changes.bias_pair import KINDS, Biases
from moegeom.studies.changes.edit import EDITS
from moegeom.studies.changes.operators.places import NOT_COMPARED
from moegeom.studies.changes.projected import ProjectedRouters, compare_projected
from moegeom.studies.changes.record import Change, RouterChange
from moegeom.studies.changes.row_pair import RowPair


class BaselineRouters:
    """The routers of a baseline as a comparison sees them; the rule is that of the results."""

    def __init__(self, baseline: Baseline, now: ProjectedRouters) -> None:
        self._routers, self._now = baseline.routers, now

    def names(self) -> list[str]:
        """In the order of the file."""
        return list(self._routers)

    def rule(self, router: str) -> Rule:
        """That of the results: another one is a finding of its own."""
        return self._now.rule(router)

    def digest(self, router: str, part: str) -> str | None:
        """Hash of the weight, the gain or a bias; None where there is none."""
        return self._routers[router].digests.get(f"{part}_digest")

    def shape(self, router: str) -> tuple[int, int]:
        """Experts and hidden size."""
        facts = self._routers[router].facts
        return int(facts["num_experts"]), int(facts["hidden_size"])

    def projections(self, router: str) -> Float64[np.ndarray, "experts count"] | None:
        """Those of the effective rows, means included."""
        known = self._routers[router]
        return known.projections.astype(np.float64) + known.mean_projections

    def half_step(self, router: str) -> Float64[np.ndarray, "experts count"] | None:
        """That of the steps in which they are written."""
        known = self._routers[router]
        return np.ones_like(known.projections, np.float64) * known.half_step[:, None]

    def lengths(self, router: str) -> Float64[np.ndarray, "experts"] | None:
        """True lengths of the centred rows."""
        return self._routers[router].norms.astype(np.float64)

    def biases(self, router: str) -> Biases:
        """Selection bias and logit bias."""
        known = self._routers[router]
        kept = (known.selection_bias, known.logit_bias)
        values: dict[str, np.ndarray | None] = dict(zip(KINDS, kept, strict=True))
        # nothing is judged by the rule of a router that only the baseline has
        ruled = router if router in self._now.facts else self._now.names()[0]
        return Biases(values, "F32", self._now.rule(ruled))


def drifts_since(results: ResultsView, baseline: Baseline) -> Mapping[str, Drift]:
    """The drift of each router of the results that the baseline knows in the same shape.

    Routers whose rows cannot be compared are left out.
    """
    now = ProjectedRouters(results)
    before = BaselineRouters(baseline, now)
    found = {}
    for router in now.names():
        if router in baseline.routers and before.shape(router) == now.shape(router):
            changed, pair = compare_projected(before, now, router)
            if not any(
                c.word == NOT_COMPARED.name and c.subject == "rows" for c in changed.changes
            ):
                found[router] = _drift(changed, pair, now.rule(router))
    return found


def _drift(changed: RouterChange, pair: RowPair | None, rule: Rule) -> Drift:
    place = np.array(changed.place, np.int64)
    moved, size = np.zeros(len(place)), 0.0
    if pair is not None:
        # a vector added to every row changes a curved rule
        moved, size = pair.row_sizes(is_shift_free=rule.is_affine), pair.change_size
    return Drift(place, moved, size, tuple(map(_since, changed.changes)))


def _since(change: Change) -> SinceBaseline:
    size = "" if change.size is None else percent(change.size)
    return SinceBaseline(
        change.word,
        change.phrase.replace("{size}", size),
        f"{change.meaning}{f' {change.detail}.' if change.detail else ''}",
        change.subject,
        EDITS[change.word].gate(change),
    )
