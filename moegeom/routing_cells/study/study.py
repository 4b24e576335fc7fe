"""``moegeom cells``: which sets of experts are cells of a slice of the input space."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from moegeom.core.errors import RouterRuleError, UsageError
from moegeom.core.router import Router
from moegeom.core.tokens import TokenSource
from moegeom.engine.session import Session
from moegeom.routing_cells.exact.certificate import cell_certificate
from moegeom.routing_cells.exact.certificate_check import CellPoint, Weights, check_certificate
from moegeom.routing_cells.record import Answer, Enumerations, RouterCells
from moegeom.routing_cells.study.files import CellFiles, draw
from moegeom.routing_cells.study.request import CellsRequest, check_request, matrix_router
from moegeom.routing_cells.study.router import prediction, sliced_router
from moegeom.routing_cells.study.slices import (
    RequestedSlice,
    SliceTokens,
    requested_slice,
    token_sample,
)

if TYPE_CHECKING:
    from moegeom.pipeline import Watch


@dataclass(frozen=True, eq=False)
class _Opened:
    """Routers, their tokens if there are any, and the facts of the run; None for a bare matrix."""

    name: str
    routers: Sequence[Router]
    source: TokenSource | None
    run: Mapping[str, Any] | None
    left_out: tuple[tuple[str, str], ...] = ()


def cells(request: CellsRequest, watch: Watch | None = None) -> Enumerations:
    """Every router that was asked for on its slice; tables and pictures where they were asked for.

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
    opened = _opened(request)
    if request.plot is not None and len(opened.routers) > 1:
        raise UsageError(
            f"--plot draws one router, {len(opened.routers)} were asked for.", "Add --layer L."
        )
    files = CellFiles(request) if request.out is not None else None
    found: list[RouterCells] = []
    answers: list[Answer] = []
    drawn: tuple[str, ...] = ()
    try:
        for router in opened.routers:
            sample = _sample(request, router, opened.source)
            asked = _slice(request, router, sample, opened.source)
            if watch is not None:
                watch.begin(f"{router.name}{prediction(router, asked, request)}")
            if request.expert_set is not None:
                answers.append(
                    answer(router, asked, request.expert_set, request.certify, request.box)
                )
                continue
            told = None if watch is None else ToldWalk(watch, router.name)
            sliced = sliced_router(router, asked, sample, request, told)
            checked = None if files is None else files.add(sliced)
            found.append(replace(sliced.record, num_checked=checked))
            if request.plot is not None:
                drawn = draw(sliced, _model(opened), request)
        if files is not None:
            files.finish()
    except BaseException:
        if files is not None:
            files.discard()
        raise
    written = () if files is None else files.names
    return Enumerations(
        name=opened.name,
        run=opened.run,
        routers=tuple(found),
        answers=tuple(answers),
        left_out=opened.left_out,
        seed=request.seed,
        written=None if request.out is None else str(request.out),
        files=(*written, *drawn),
    )


def _model(opened: _Opened) -> str:
    """Family and name: of a checkpoint in a series the name alone says little."""
    if opened.run is None:
        return opened.name
    return f"{opened.run['checkpoint']['family']} {opened.name}"


def _opened(request: CellsRequest) -> _Opened:
    if request.weights is not None:
        assert request.asked.top_k is not None
        return _Opened(
            request.weights.name, [matrix_router(request.weights, request.asked.top_k)], None, None
        )
    opened = Session.open(request)
    looked = opened.recorded
    return _Opened(
        opened.routers.checkpoint, looked, opened.source, opened.facts(looked), opened.left_out
    )


def _sample(
    request: CellsRequest, router: Router, source: TokenSource | None
) -> SliceTokens | None:
    if source is None:
        return None
    return token_sample(router, source, request)


def _slice(
    request: CellsRequest,
    router: Router,
    sample: SliceTokens | None,
    source: TokenSource | None,
) -> RequestedSlice:
    """What --subspace names; without it the plane of the picture, or the whole space."""
    text = request.subspace
    if text is None:
        text = "full" if request.plot is None or sample is None else "pca:2"
    name = "" if source is None else source.facts.name
    return requested_slice(text, router, sample, name, request.seed)


#: Answers in exact arithmetic after which it is said that they take long: some seconds.
_LONG = 500


class ToldWalk:
    """What a walk tells of itself: vertices as progress, and once that it will take long.

    That is said where no progress is shown, too.
    """

    def __init__(self, watch: Watch, router: str) -> None:
        self._watch, self._router, self._done, self._is_said = watch, router, 0, False

    def __call__(self, num_done: int, num_known: int) -> None:
        """How many vertices are done of those that are known."""
        self._watch.start(num_known)
        self._watch.advance(num_done - self._done)
        self._done = num_done

    def settles(self, num_exact: int) -> None:
        """Says at the first that are many what takes the time."""
        if num_exact < _LONG or self._is_said:
            return
        self._is_said = True
        self._watch.say(
            f"{self._router}: many experts tie, or nearly so, in the same places; {_LONG} answers "
            "and more are left to exact arithmetic, which may take minutes"
        )


def answer(
    router: Router,
    asked: RequestedSlice,
    expert_set: tuple[int, ...],
    with_check: bool,
    box: float | None = None,
) -> Answer:
    """A certificate for one set of experts on one slice, in the box around its centre if given.

    Raises
    ------
    UsageError
        When the set is none of ``top_k`` different experts.
    RouterRuleError
        When the facets of the router are curved: then no set has a certificate of this kind.
    """
    started = time.perf_counter()
    chosen = tuple(sorted(set(expert_set)))
    k, experts = router.rule.top_k, router.num_experts
    if len(chosen) != k or len(expert_set) != k or not 0 <= chosen[0] <= chosen[-1] < experts:
        raise UsageError(
            f"--expert-set {','.join(map(str, expert_set))}: expected {k} different experts from 0 "
            f"to {experts - 1}, as many as router {router.name} chooses."
        )
    if not router.rule.is_affine or asked.circle is not None:
        raise RouterRuleError(
            f"router {router.name}: certificates are for linear routers on a flat slice "
            f"({router.rule.selection_score_unit})."
        )
    bias = router.affine_bias
    weight = router.weight.astype(np.float64)
    offset = None if bias is None else bias.astype(np.float64)
    if asked.part is not None:
        weight, offset = asked.part.instance(weight, offset)
    sides = None if box is None else np.full(weight.shape[1], box)
    low = None if sides is None else -sides
    found = cell_certificate(weight, offset, chosen, low, sides)
    if offset is None and sides is None and isinstance(found, CellPoint):
        found = _of_usual_size(found)
    if with_check:
        check_certificate(weight, offset, chosen, found, lower=low, upper=sides)
    where = asked.text if box is None else f"{asked.text}, within {box:g} along every direction"
    margin, weights = None, None
    if isinstance(found, CellPoint):
        point = np.array([float(value) for value in found.point])
        logits = weight @ point + (0.0 if offset is None else offset)
        inside = np.isin(np.arange(experts), chosen)
        margin = float(logits[inside].min() - logits[~inside].max()) if k < experts else np.inf
    else:
        weights = _rounded(found.inside), _rounded(found.outside)
    return Answer(
        router=router.name,
        expert_set=chosen,
        subspace=where,
        is_cell=isinstance(found, CellPoint),
        margin=margin,
        weights=weights,
        certificate=found.as_json(),
        is_checked=with_check,
        seconds=time.perf_counter() - started,
    )


def _of_usual_size(found: CellPoint) -> CellPoint:
    """A point of a cone, scaled by a power of two until its largest coordinate is near 1."""
    largest = max((abs(value) for value in found.point), default=Fraction(0))
    if largest == 0:
        return found
    away = largest.numerator.bit_length() - largest.denominator.bit_length()
    return CellPoint(tuple(value / Fraction(2) ** away for value in found.point))


def _rounded(weights: Weights) -> tuple[tuple[int, float], ...]:
    return tuple((expert, float(share)) for expert, share in weights)
