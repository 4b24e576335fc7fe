"""``moegeom regions``: how much of the non-linearity between tokens is routing?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from moegeom.core.errors import RouterError, UsageError
from moegeom.core.router import Router
from moegeom.core.tokens import TokenSource
from moegeom.engine.session import Session
from moegeom.kernels.table import load_kernels
from moegeom.pipeline import Watch
from moegeom.router.expert_tensors import ExpertTensors, open_experts
from moegeom.studies.announced import announce
from moegeom.studies.cells.study.slices import requested_slice
from moegeom.studies.cells.study.tokens import SliceTokens, token_sample
from moegeom.studies.regions.record import EarlierRegions, Regions, RegionsRequest, RouterRegions
from moegeom.studies.regions.router import router_regions, ways_of
from moegeom.studies.written import refuse_out, write_rows


def regions(request: RegionsRequest, watch: Watch | None = None) -> Regions:
    """Changes of the set and of neurons between tokens, and regions in a plane, router by router.

    Raises
    ------
    RouterError
        When the checkpoint has no experts, or they are stored in a way that is not known.
    RecordingError
        When the recording does not hold router inputs, or records none of the routers.
    UsageError
        Without tokens, when more than 2 GB are to be read without ``yes``, when no router has
        linear boundaries, and when ``out`` cannot be written.
    """
    if request.out is not None:
        refuse_out(request.out, request.overwrite, (".parquet",))
    if request.segments < 2:
        raise UsageError(f"--segments {request.segments}: expected 2 or more.")
    opened = Session.open(request)
    source = opened.source
    if source is None:
        raise UsageError("regions are counted between recorded tokens.", "Add --tokens REC.")
    left_out = list(opened.left_out)
    asked = [router for router in opened.recorded if router.rule.is_affine]
    left_out += [
        (router.name, "its boundaries are not linear, and no crossings are computed")
        for router in opened.recorded
        if not router.rule.is_affine
    ]
    if not asked:
        raise UsageError(f"{left_out[0][0]}: {left_out[0][1]}.")
    tensors = {router.name: open_experts(opened.store, router) for router in asked}
    before = _before(request, asked)
    experts = [*tensors.values(), *(one for pairs in before.values() for _, one in pairs)]
    announce(experts, request.yes, watch)
    if watch:
        watch.start(len(asked))
    found = []
    for router in asked:
        if watch:
            watch.begin(router.name)
        sample = token_sample(router, source, load_kernels(request.backend), request.seed)
        ways = ways_of(sample, _documents(sample, source), request.segments, request.seed)
        plane = requested_slice(request.subspace, router, sample, source.facts.name, request.seed)
        both = [(router, tensors[router.name]), *before.get(router.name, ())]
        one, *earlier = (
            router_regions(twin, experts, ways, plane, sample, request) for twin, experts in both
        )
        if earlier:
            (twin,) = earlier
            one = dataclasses.replace(one, before=EarlierRegions(twin.ways, twin.plane))
        found.append(one)
        if watch:
            watch.advance(1)
    if request.out is not None:
        _write(request.out, found)
    return Regions(
        run=opened.facts(asked),
        routers=tuple(found),
        left_out=tuple(left_out),
        seed=request.seed,
        against=request.against,
        written=None if request.out is None else request.out.name,
    )


def _before(
    request: RegionsRequest, asked: Sequence[Router]
) -> dict[str, list[tuple[Router, ExpertTensors]]]:
    """The same router of the checkpoint to compare with, and its experts, by name."""
    if request.against is None:
        return {}
    other = Session.of(request.against, request)
    named = {router.name: router for router in other.chosen}
    for router in asked:
        twin = named.get(router.name)
        if twin is None or twin.weight.shape != router.weight.shape:
            raise RouterError(
                f"{request.against}: has no router {router.name} of "
                f"{router.num_experts} x {router.hidden_size} to compare with.",
                "--against is an earlier state of the same model.",
            )
    return {r.name: [(named[r.name], open_experts(other.store, named[r.name]))] for r in asked}


def _documents(sample: SliceTokens, source: TokenSource) -> Int64[np.ndarray, "tokens"]:
    """The document of each token; -1 where it is not known."""
    total = source.facts.num_tokens
    return source.read_columns(0, total).document[sample.token]


def _write(out: Path, found: Sequence[RouterRegions]) -> None:
    rows = []
    for router in found:
        for one, is_before in ((router, False), (router.before, True)):
            if one is None:
                continue
            same = {"router": router.router, "against": is_before}
            rows += [same | dataclasses.asdict(way) for way in one.ways]
            cells = zip(one.plane.expert_sets, one.plane.of_cell, strict=True)
            rows += [
                same | {"way": "plane", "cell": list(cell), "regions": float(number)}
                for cell, number in cells
            ]
    write_rows(out, rows)
