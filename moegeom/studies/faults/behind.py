"""A second fault of the same tokens: the larger one is applied, and what is left is looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from moegeom.core.shapes import Bool, Int64
from moegeom.geometry.rows import common_choices, expert_matching
from moegeom.geometry.selection import top_k
from moegeom.studies.faults.operator import Proposal, Site, Values
from moegeom.studies.faults.scope import Fault, Where
from moegeom.studies.faults.score import (
    LEAST_BITS,
    NEAR,
    REPAIRS,
    SiteScores,
    believed,
    explaining,
    faults,
    mended,
    score_site,
)

#: Faults of the same tokens at most, and bits from which one that repairs little is applied.
_MOST, _APPLIED = 3, 8.0 * LEAST_BITS

#: Tokens that are routed again at once, those below which nothing is looked for, and the share of
#: the sets below which what is left is noise.
_AT_ONCE, _LEAST, _LEFT = 2048, 64, 0.02


def with_later(
    pool: Sequence[Fault],
    sites: Mapping[str, tuple[Site, Values]],
    scores: Sequence[SiteScores],
    where: Where,
) -> list[Fault]:
    """The faults; in place of the leading one that and what is left behind it, if bits are saved.

    ``sites`` by router, with the inputs of their tokens.
    """
    credible = (one for one in pool if not (one.inherits or one.is_fitted))
    first = believed(pool) or next((one for one in credible if one.bits >= _APPLIED), None)
    if first is None or first.parts or 1.0 - first.reproduced[first.router] < _LEFT:
        return list(pool)
    whole, step, before = first, first, scores
    rows = np.arange(len(where.document))
    for _ in range(_MOST - 1):
        some = np.flatnonzero(step.region.is_inside)
        rows = rows[some]
        moved = {
            one.router: _applied(*sites[one.router], one.scored[step.name].candidate, some)
            for one in before
            if one.router in step.routers
        }
        sites = {name: pair for name, pair in moved.items() if pair is not None}
        if len(sites) < len(moved) or len(rows) < _LEAST:
            break
        before = [score_site(site, values) for site, values in sites.values()]
        inside = Where(where.document[rows], where.position[rows], where.number[rows])
        behind = believed(faults(before, inside))
        if behind is None or behind.router != whole.router:
            break
        whole, step = _joined(whole, behind, before, scores, rows), behind
    if whole is first or (believed(pool) is None and whole.repaired < REPAIRS):
        return list(pool)
    if any(one.mended >= whole.mended - NEAR for one in explaining(pool)):
        return list(pool)  # one fault does as much
    return [whole, *(one for one in pool if one.name != first.name)]


def _applied(
    site: Site, values: Values, candidate: Proposal, some: Int64[np.ndarray, "some"]
) -> tuple[Site, Values] | None:
    """The site of some tokens as the fault makes it; None where it leaves no router or inputs."""
    is_of_sets = candidate.scores is not None or candidate.rows is not None
    if is_of_sets or not site.has_logits or len(some) < _LEAST:
        return None

    def read(rows: np.ndarray) -> np.ndarray | None:
        own = values(some[rows])
        if own is None or candidate.inputs is None:
            return own
        return candidate.inputs(site, some[rows], own)

    logits, router, scores = site.logits[some], site.router, site.scores[some]
    if candidate.routed is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            parts = [some[start : start + _AT_ONCE] for start in range(0, len(some), _AT_ONCE)]
            of_parts = [
                candidate.logits(site, part, values(part) if site.has_inputs else None)
                for part in parts
            ]
            logits = np.concatenate(of_parts)
            scores = candidate.routed.compared(logits)
        router = dataclasses.replace(
            candidate.routed.router,
            logit_bias=candidate.routed.logit_bias,
            selection_bias=candidate.routed.selection_bias,
        )
    selection, theirs = candidate.selection(site, some, logits), candidate.theirs(site, some)
    mine, recorded = top_k(selection, theirs.shape[1]), site.recorded
    if recorded is not None:
        recorded = dataclasses.replace(recorded, values=recorded.values[some])
    moved = dataclasses.replace(
        site,
        router=router,
        logits=logits,
        scores=scores,
        selection=selection,
        mine=mine,
        theirs=theirs,
        columns=site.columns.at(some),
        matching=expert_matching(common_choices(mine, theirs, len(site.matching))),
        recorded=recorded,
        chosen_at=lambda place: site.chosen_at(place)[some],
        values_at=lambda place: (
            read if place == site.number else lambda rows: site.values_at(place)(some[rows])
        ),
        decides=site.decides[some],
    )
    return moved, read


def _joined(
    first: Fault,
    behind: Fault,
    again: Sequence[SiteScores],
    scores: Sequence[SiteScores],
    rows: Int64[np.ndarray, "some"],
) -> Fault:
    """Both as one fault of the cause that saves more; ``rows`` are the tokens of the first."""
    met: dict[str, Bool[np.ndarray, "tokens"]] = {}
    own = {one.router: one for one in scores}
    for one in again:
        before = own[one.router]
        under = first.met.get(one.router, before.scored[first.operator].is_met).copy()
        if one.router in behind.routers:
            inside = behind.region.is_inside
            under[rows[inside]] = one.scored[behind.name].is_met[inside]
        met[one.router] = under
    is_inside, place = first.region.is_inside, first.router
    most = max(first, behind, key=lambda one: one.bits)
    scope = f", in {behind.region.text}" if behind.region.text else ""
    return dataclasses.replace(
        first,
        name=f"{first.name}+{behind.name}",
        leading=first.operator,
        text=f"{first.text}, and of the same tokens {behind.text}{scope}",
        cause=most.cause,
        bits=first.bits + behind.bits,
        reproduced={name: float(under[is_inside].mean()) for name, under in met.items()},
        routers=tuple(name for name in first.routers if name in met),
        explained=max(first.explained, behind.explained),
        mended=mended(own[place].is_met, np.where(is_inside, met[place], own[place].is_met)),
        met=met,
    )
