"""``research cells``: which sets of experts are cells of a slice of the input space."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from moegeom.core.errors import RouterRuleError, UsageError
from moegeom.core.router import Router
from moegeom.engine.session import Session
from moegeom.routing_cells.exact.certificate import cell_certificate
from moegeom.routing_cells.exact.certificate_check import CellPoint, Weights, check_certificate
from moegeom.routing_cells.files import CellFiles, draw
from moegeom.routing_cells.record import Answer, Enumerations, RouterCells
from moegeom.routing_cells.request import CellsRequest, check_request
from moegeom.routing_cells.router import instance_of, prediction, sliced_router
from moegeom.routing_cells.slices import (
    RequestedSlice,
    matrix_router,
    requested_slice,
    token_sample,
)

if TYPE_CHECKING:
    from moegeom.pipeline import Watch


def cells(request: CellsRequest, watch: Watch | None = None) -> Enumerations:
    """Every router of the request on its slice, with tables and pictures where it names files.

    Raises
    ------
    UsageError
        When the request cannot be meant, or a picture or ``out`` cannot be written.
    RouterRuleError
        When cells of a curved or grouped router are to be listed.
    RecordingError
        When the recording does not hold what the slice is laid through.

    Examples
    --------
    >>> import moegeom as mg
    >>> ckpt, rec = (f"sample_ckpts/olmoe-balanced/{name}step_1500" for name in ("", "rec/"))
    >>> report = mg.cells(ckpt, rec, layers=0, subspace="pca:2")
    >>> report.value.routers[0].cells.num_cells > 10
    True
    """
    check_request(request)
    # numbers near the ends of float64 leave it on the way; what follows is proved or taken exactly
    with np.errstate(over="ignore", invalid="ignore"):
        return _cells(request, watch)


def _cells(request: CellsRequest, watch: Watch | None) -> Enumerations:
    run, source, left_out, family = None, None, (), ""
    if request.weights is not None:
        assert request.asked.top_k is not None
        name = request.weights.name
        routers = [matrix_router(request.weights, request.asked.top_k)]
    else:
        opened = Session.open(request)
        name, routers, source = opened.routers.checkpoint, opened.recorded, opened.source
        run, left_out = opened.facts(routers), opened.left_out
        family = f"{run['checkpoint']['family']} "
    if request.plot is not None and len(routers) > 1:
        raise UsageError(
            f"--plot draws one router, {len(routers)} were asked for.", "Add --layer L."
        )
    recording = "" if source is None else source.facts.name
    subspace = request.subspace
    if subspace is None:
        subspace = "full" if request.plot is None or source is None else "pca:2"
    records: list[RouterCells] = []
    answers: list[Answer] = []
    names: list[str] = []
    with nullcontext() if request.out is None else CellFiles(request) as files:
        for router in routers:
            sample = None if source is None else token_sample(router, source, request)
            part = requested_slice(subspace, router, sample, recording, request.seed)
            if watch is not None:
                watch.begin(f"{router.name}{prediction(router, part, request)}")
            if request.expert_set is not None:
                answers.append(answer(router, part, request.expert_set, request))
                continue
            listener = None if watch is None else WalkListener(watch, router.name)
            sliced = sliced_router(router, part, sample, request, listener)
            num_checked = None if files is None else files.add(sliced)
            records.append(replace(sliced.record, num_checked=num_checked))
            if request.plot is not None:
                names += draw(sliced, family + name)
        if files is not None:
            names = [*files.finish(), *names]
    return Enumerations(
        name=name,
        run=run,
        routers=tuple(records),
        answers=tuple(answers),
        left_out=left_out,
        seed=request.seed,
        written=None if request.out is None else str(request.out),
        files=tuple(names),
    )


#: Answers in exact arithmetic after which a note says that they take long: some seconds.
_LONG = 500


class WalkListener:
    """Tells a watch of a walk: vertices as progress, and once that it will take long.

    The note appears where no progress is shown, too.
    """

    def __init__(self, watch: Watch, router: str) -> None:
        self._watch, self._router, self._num_done, self._has_noted = watch, router, 0, False

    def __call__(self, num_done: int, num_known: int) -> None:
        """How many vertices are done of those that are known."""
        self._watch.start(num_known)
        self._watch.advance(num_done - self._num_done)
        self._num_done = num_done

    def settles(self, num_exact: int) -> None:
        """Notes at the first large number what takes the time."""
        if num_exact < _LONG or self._has_noted:
            return
        self._has_noted = True
        self._watch.say(
            f"{self._router}: many experts tie, or nearly so, in the same places; {_LONG} answers "
            "and more are left to exact arithmetic, which may take minutes"
        )


def answer(
    router: Router, part: RequestedSlice, expert_set: tuple[int, ...], request: CellsRequest
) -> Answer:
    """A certificate for one set of experts on one slice, in the box of the request if it has one.

    Raises
    ------
    UsageError
        When the set is none of ``top_k`` different experts.
    RouterRuleError
        When the facets of the router are curved: then no set has a certificate of this kind.
    """
    started, box = time.perf_counter(), request.box
    chosen = tuple(sorted(set(expert_set)))
    k, experts = router.rule.top_k, router.num_experts
    if len(chosen) != k or len(expert_set) != k or not 0 <= chosen[0] <= chosen[-1] < experts:
        raise UsageError(
            f"--expert-set {','.join(map(str, expert_set))}: expected {k} different experts from 0 "
            f"to {experts - 1}, as many as router {router.name} chooses."
        )
    if not router.rule.is_affine or part.circle is not None:
        raise RouterRuleError(
            f"router {router.name}: certificates are for linear routers on a flat slice "
            f"({router.rule.selection_score_unit})."
        )
    weight, bias = instance_of(router, part)
    upper = None if box is None else np.full(weight.shape[1], box)
    lower = None if upper is None else -upper
    proof = cell_certificate(weight, bias, chosen, lower, upper)
    margin, weights = None, None
    if isinstance(proof, CellPoint):
        if box is None and not bias.any():
            proof = _of_usual_size(proof)
        point = np.array([float(value) for value in proof.point])
        logits = weight @ point + bias
        inside = np.isin(np.arange(experts), chosen)
        margin = float(logits[inside].min() - logits[~inside].max()) if k < experts else np.inf
    else:
        weights = _rounded(proof.inside), _rounded(proof.outside)
    if request.certify:
        check_certificate(weight, bias, chosen, proof, lower=lower, upper=upper)
    return Answer(
        router=router.name,
        expert_set=chosen,
        subspace=part.text + ("" if box is None else f", within {box:g} along every direction"),
        is_cell=isinstance(proof, CellPoint),
        margin=margin,
        weights=weights,
        certificate=proof.as_json(),
        is_checked=request.certify,
        seconds=time.perf_counter() - started,
    )


def _of_usual_size(cone: CellPoint) -> CellPoint:
    """A point of a cone, scaled by a power of two until its largest coordinate is near 1."""
    largest = max((abs(value) for value in cone.point), default=Fraction(0))
    if largest == 0:
        return cone
    away = largest.numerator.bit_length() - largest.denominator.bit_length()
    return CellPoint(tuple(value / Fraction(2) ** away for value in cone.point))


def _rounded(weights: Weights) -> tuple[tuple[int, float], ...]:
    return tuple((expert, float(share)) for expert, share in weights)
