"""``moegeom continuity``: the output of the experts along a line over the nearest boundary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moegeom.core.errors import UsageError
from moegeom.core.router import Router
from moegeom.engine.jumps import why_no_jumps
from moegeom.engine.session import Session
from moegeom.kernels.table import load_kernels
from moegeom.pipeline import Watch
from moegeom.router.expert_functions import CountedExperts, open_expert_functions
from moegeom.studies.announced import announce_experts
from moegeom.studies.continuity.record import (
    BoundaryCrossing,
    Continuity,
    ContinuityRequest,
    RouterContinuity,
)
from moegeom.studies.continuity.router import parse_smooth, router_continuity
from moegeom.studies.written import refuse_out, write_rows


def continuity(request: ContinuityRequest, watch: Watch | None = None) -> Continuity:
    """The output of hard and smoothed gates along a line over a boundary, router by router.

    Raises
    ------
    RouterError
        When the checkpoint has no experts, or they are stored in a way that is not known.
    RecordingError
        When the recording records none of the routers, or a token is not finite.
    UsageError
        Without tokens, when jumps of no router are known, when no line is free of other boundaries,
        when more than 2 GB are to be read without ``yes``, and when ``out`` cannot be written.
    """
    if request.out is not None:
        refuse_out(request.out, request.overwrite, (".parquet",))
    parse_smooth(request.smooth)
    if not 0.0 < request.radius < math.inf:
        raise UsageError(f"--radius {request.radius:g}: expected a length above 0.")
    opened = Session.open(request)
    source = opened.source
    if source is None:
        raise UsageError("lines are drawn through recorded tokens.", "Add --tokens REC.")
    total = source.facts.num_tokens
    if request.at is not None and not 0 <= request.at < total:
        raise UsageError(f"--at {request.at}: {source.facts.name} holds tokens 0 to {total - 1:,}.")
    reasons = {router.name: why_no_jumps(router, source.facts) for router in opened.recorded}
    asked = [router for router in opened.recorded if not reasons[router.name]]
    left_out = [*opened.left_out, *((name, why) for name, why in reasons.items() if why)]
    if not asked:
        raise UsageError(f"{left_out[0][0]}: {left_out[0][1]}.")
    announce_experts(dataclasses.replace(opened, chosen=tuple(asked)), request.yes, watch)
    if watch:
        watch.start(len(asked))
    found = []
    for router in asked:
        if watch:
            watch.begin(router.name)
        found.append(_of_router(router, opened, request))
        if watch:
            watch.advance(1)
    if request.out is not None:
        _write(request.out, found)
    return Continuity(
        run=opened.facts(asked),
        routers=tuple(found),
        left_out=tuple(left_out),
        smooth=request.smooth,
        radius=request.radius,
        seed=request.seed,
        written=None if request.out is None else request.out.name,
    )


def _of_router(router: Router, opened: Session, request: ContinuityRequest) -> RouterContinuity:
    assert opened.source is not None
    experts = CountedExperts(open_expert_functions(opened.store, router))
    kernels = load_kernels(request.backend)
    return router_continuity(router, opened.source, kernels, experts, request)


# --------------------------------------------------------------------------------------------- file


def rows_of(crossing: BoundaryCrossing) -> Iterator[dict[str, Any]]:
    """Rows of the file: the line, and spreads by radius, of each gate."""
    same = {"token": crossing.token, "coordinate": crossing.coordinate}
    for along in filter(None, (crossing.hard, crossing.smooth)):
        of_gate = {"gate": along.gate, **same}
        for offset, value in zip(crossing.offset.tolist(), along.line.tolist(), strict=True):
            yield {"what": "line", **of_gate, "offset": offset, "output": value}
        columns = ("spread", "slope", "spread_coordinate", "slope_coordinate")
        values = zip(*(getattr(along, name).tolist() for name in columns), strict=True)
        for radius, one in zip(crossing.radius.tolist(), values, strict=True):
            known = {n: None if math.isnan(v) else v for n, v in zip(columns, one, strict=True)}
            yield {"what": "spread", **of_gate, "radius": radius, **known}


def _write(out: Path, found: Sequence[RouterContinuity]) -> None:
    write_rows(
        out, [{"router": one.router, **row} for one in found for row in rows_of(one.crossing)]
    )
