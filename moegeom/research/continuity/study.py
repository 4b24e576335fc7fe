"""``research continuity``: the output of the experts along a line over the nearest boundary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from moegeom.core.errors import RouterRuleError, UsageError
from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float64, Int32, Int64
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE
from moegeom.engine.jumps import ExactRouter, TokenJumps, TokenTies, token_ties, why_no_jumps
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS, one_blas_thread
from moegeom.engine.prepared import PreparedRouter, prepare
from moegeom.engine.sample import Sample, refuse_tokens_beyond
from moegeom.engine.search_pace import SearchPace
from moegeom.geometry import whatif
from moegeom.geometry.boundary.linear import boundary_distance
from moegeom.geometry.jump import Mixture, SpreadByRadius, spread_within
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.table import load_kernels
from moegeom.pipeline import Watch
from moegeom.research.continuity import STUDY
from moegeom.research.continuity.record import (
    Along,
    BoundaryCrossing,
    Continuity,
    ContinuityRequest,
    RouterContinuity,
)
from moegeom.router.expert_functions import CountedExperts, open_expert_functions
from moegeom.studies.announced import announce_experts
from moegeom.studies.study import each
from moegeom.studies.written import write_rows

# --------------------------------------------------------------------------------------- one router
#: Tokens that are looked at, of fewer where so many numbers are no more of them, and lines that
#: are tried at once, highest jump first.
TOKENS, _NUMBERS, _AT_ONCE = 2000, 2**22, 64

#: Bytes of all experts up to which all of them are read, and the jumps of all tokens are known; of
#: more, lines whose jumps are looked at, those of most routing weight first.
_READ_ALL, _LINES = 2**27, 8

#: Numbers of experts that are read for all those lines, and lines that are looked at together.
_READ, _TOGETHER = 1.6e9, 4

#: Radii, and the least of them over the largest.
_RADII, _SMALLEST = 40, 1e-4

#: Points of the picture, and steps between two radii: the most of which the products of both gates
#: are no more than these, 3 seconds of one core, about; the last in any case.
_POINTS, _PRODUCTS = ((401, 4), (201, 2), (101, 1)), 5e10

#: Radii of the smallest decade, over which slopes are told.
_DECADE = _RADII // 4

#: How near the distance from a point of the line must be to that of the tie behind it, so that no
#: other boundary is nearer. The rest of the way is that of the step beside the tie.
_AS_FAR = 1.0 - 1e-5


def router_continuity(
    router: Router,
    some: Sample,
    fitted: Sample,
    kernels: Kernels,
    experts: CountedExperts,
    request: ContinuityRequest,
    pace: SearchPace,
) -> RouterContinuity:
    """The line of one of ``some`` tokens, with the hard gate and one smoothed for those ``fitted``.

    Raises
    ------
    UsageError
        When no line, or not that of the token asked for, is free of other boundaries.
    """
    prepared, exact = prepare(router), ExactRouter(router)
    inputs = some.inputs.astype(np.float64)
    with one_blas_thread():  # the arithmetic of the scan
        ties = token_ties(prepared, inputs, some.logits, some.chosen, kernels)
        row, tried, num_jumps = _clear_line(prepared, kernels, some, ties, experts, request, pace)
        jumps = ties.jumps(np.array([row]), experts.mixed)
        budget, reason = _budget(exact, fitted, request)
        crossing = _crossing(exact, some, jumps, row, budget, experts, request)
    if pace.watch:
        pace.watch.advance(1)
    return RouterContinuity(
        router=router.name,
        hidden_size=router.hidden_size,
        num_tokens=len(some.token),
        num_known=int(ties.tie.is_known.sum()),
        num_tried=tried,
        num_jumps=num_jumps,
        eps=budget.eps if budget else float("nan"),
        extra=budget.extra if budget else float("nan"),
        unit=router.rule.selection_score_unit,
        steepest_activation=whatif.largest_slope(),
        crossing=crossing,
        has_groups=router.rule.groups is not None,
        reason=reason,
        **experts.facts,
    )


# ----------------------------------------------------------------------------------------- the line
def _clear_line(
    prepared: PreparedRouter,
    kernels: Kernels,
    some: Sample,
    ties: TokenTies,
    experts: CountedExperts,
    request: ContinuityRequest,
    pace: SearchPace,
) -> tuple[int, int, int]:
    """The row with the highest jump whose line meets no other boundary, how many were tried, and
    of how many the jump is known: of large experts only those whose boundary has most weight.
    """
    rows = np.flatnonzero(ties.tie.is_known)
    name = ties.exact.router.name
    if not len(rows):
        which = "any token" if request.at is None else f"token {request.at}"
        raise UsageError(
            f"router {name}: the nearest boundary point of {which} is not known.",
            "Nearest are a change of groups, equal rows, or a corner; ask for another token.",
        )
    is_known = experts.functions.bytes_of() <= _READ_ALL
    if is_known:
        heights = ties.heights(rows, experts.mixed)
    else:
        heights = _weight_exchanged(ties, rows)
    rows = rows[np.argsort(-heights, kind="stable")]
    of_one = experts.functions.tensors.num_values * (ties.chosen.shape[1] + 1)
    lines = min(max(int(_READ / of_one), 2), _LINES)
    clear: list[int] = []
    tried = 0
    for start in range(0, len(rows), _AT_ONCE):
        few = rows[start : start + _AT_ONCE]
        hits = np.flatnonzero(_is_clear(prepared, kernels, some, ties, few, request))
        clear += few[hits].tolist()
        if len(clear) >= (1 if is_known else lines):
            tried = start + int(hits[-1]) + 1
            break
        tried = start + len(few)
    if pace.watch:  # the lines that are not looked at one by one
        pace.watch.advance(_LINES if is_known else _LINES - len(clear[:lines]))
    if clear and is_known:
        return clear[0], int(np.flatnonzero(rows == clear[0])[0]) + 1, len(rows)
    if clear:
        # a few at a time, which read the experts that any of their jumps needs once
        few = np.array(clear[:lines])
        parts = pace.parts(np.split(few, range(_TOGETHER, len(few), _TOGETHER)), len)
        heights = np.concatenate([ties.heights(rows, experts.mixed) for rows in parts])
        return int(few[np.argmax(heights)]), tried, len(few)
    raise UsageError(
        f"router {name}: of {number_of(len(rows), 'line')} every one meets another boundary "
        f"within {request.radius:g} rms lengths of the input.",
        f"Look at a shorter line: --radius {request.radius / 4.0:g}.",
    )


def _weight_exchanged(
    ties: TokenTies, rows: Int64[np.ndarray, "rows"]
) -> Float64[np.ndarray, "rows"]:
    """Routing weight of the two experts that change places, on both sides of the boundary."""
    total = np.zeros(len(rows))
    for (experts, weights), column in zip(ties.sides(rows), (0, 1), strict=True):
        total += np.where(experts == ties.pair[rows, column, None], weights, 0.0).sum(axis=1)
    return total


def _is_clear(
    prepared: PreparedRouter,
    kernels: Kernels,
    some: Sample,
    jumps: TokenTies,
    row: Int64[np.ndarray, "rows"],
    request: ContinuityRequest,
) -> Bool[np.ndarray, "rows"]:
    """Whether the way to r on both sides of the tie is in one cell each.

    From the point at r/2 the tie is at r/2. Where no boundary is nearer, the ball of that radius,
    and with it the way from the tie to r, is free of others.
    """
    half, exact = 0.5 * _reach(some, row, request.radius), jumps.exact
    is_clear = np.ones(len(row), bool)
    for sign in (1.0, -1.0):
        at = jumps.tie.point[row] + sign * half[:, None] * jumps.tie.normal[row]
        logits = exact.logits(at)
        chosen = exact.chosen(logits)
        expected = jumps.chosen[row] if sign > 0.0 else jumps.after[row]
        is_clear &= whatif.same_sets(chosen, expected)
        if prepared.rows is not None:
            distance = boundary_distance(logits, chosen, prepared.rows).distance
        else:
            distance = kernels["curved_distance"](logits, chosen, prepared.curved, on_rays=False)[0]
        is_clear &= distance >= _AS_FAR * half
    return is_clear


def _reach(
    some: Sample, row: Int64[np.ndarray, "rows"], radius: float
) -> Float64[np.ndarray, "rows"]:
    """The largest radius of each token in units of the router input: |y| is sqrt(D) rms lengths."""
    return radius * np.sqrt((some.inputs[row].astype(np.float64) ** 2).sum(axis=1))


def _crossing(
    exact: ExactRouter,
    some: Sample,
    jumps: TokenJumps,
    row: int,
    budget: whatif.SmoothingBudget | None,
    experts: CountedExperts,
    request: ContinuityRequest,
) -> BoundaryCrossing:
    largest = float(_reach(some, np.array([row]), request.radius)[0])
    radius = largest * np.logspace(np.log10(_SMALLEST), 0.0, _RADII)
    products = experts.functions.tensors.num_values * exact.router.rule.top_k
    num_points, between = next(
        (of for of in _POINTS if 2 * (of[0] + 2 * _RADII * of[1]) * products <= _PRODUCTS),
        _POINTS[-1],
    )
    dense = np.logspace(np.log10(_SMALLEST), 0.0, (_RADII - 1) * between + 1) * largest
    dense[::between] = radius
    both = np.concatenate([-dense[::-1], dense])
    # an even number of steps would land on the tie, where either set may be chosen
    offsets = largest * np.linspace(-1.0, 1.0, num_points + 1)
    point, normal = jumps.tie.point[0], jumps.tie.normal[0]

    def at(offset: np.ndarray) -> np.ndarray:
        return point + offset[:, None] * normal

    points = at(np.concatenate([both, offsets]))
    hard, *smoothed = _outputs(exact, points, budget, experts.mixed)
    spread = spread_within(both, hard[: len(both)], radius)
    coordinate, smooth = spread.coordinate, None
    line = hard[len(both) :, coordinate]
    for outputs in smoothed:
        along = spread_within(both, outputs[: len(both)], radius, coordinate)
        smooth = _along("smooth", outputs[len(both) :, coordinate], along)
    return BoundaryCrossing(
        token=int(some.token[row]),
        pair=(int(jumps.pair[0, 0]), int(jumps.pair[0, 1])),
        distance=float(jumps.tie.distance[0]),
        rms=float(np.sqrt((some.inputs[row].astype(np.float64) ** 2).mean())),
        jump=float(jumps.height[0]),
        output=float(jumps.output[0]),
        coordinate=coordinate,
        offset=offsets,
        radius=radius,
        hard=_along("hard", line, spread),
        smooth=smooth,
        fades_at=_fades_at(exact, at(np.array([-largest, largest])), jumps.pair[0], budget),
    )


def _fades_at(
    exact: ExactRouter,
    ends: Float64[np.ndarray, "2 hidden"],
    pair: Int32[np.ndarray, "2"],
    budget: whatif.SmoothingBudget | None,
) -> float:
    """The larger gap at both ends between the k-th score and that of the expert left out there, in
    eps; nan where nothing is smoothed.
    """
    if budget is None or budget.eps == 0.0:
        return float("nan")
    selection = exact.selection(exact.logits(ends))
    last = np.sort(selection, axis=1)[:, -exact.router.rule.top_k]
    # the first expert of the pair is left out before the tie, the second behind it
    return float((last - selection[[0, 1], pair]).max() / budget.eps)


def _along(
    gate: Literal["hard", "smooth"], line: Float64[np.ndarray, "points"], spread: SpreadByRadius
) -> Along:
    near = spread.slope[1 : _DECADE + 1]
    return Along(
        gate=gate,
        line=line,
        spread=spread.whole,
        slope=spread.slope,
        spread_coordinate=spread.one,
        slope_coordinate=spread.one_slope,
        slope_near=float(np.median(near)),
        steepest=float((spread.whole / spread.radius).max()),
    )


# ---------------------------------------------------------------------------------- the smooth gate
def parse_smooth(text: str) -> tuple[str, float]:
    """``extra=0.5`` or ``eps=0.1``; UsageError for anything else."""
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if name not in ("extra", "eps") or not 0.0 < number < np.inf:
        raise UsageError(
            f"--smooth {text}: expected a positive number of extra experts, or a width.",
            "Such as extra=0.5 (more experts a token in the mean), or eps=0.1 (selection score).",
        )
    return name, number


def _budget(
    exact: ExactRouter, fitted: Sample, request: ContinuityRequest
) -> tuple[whatif.SmoothingBudget | None, str]:
    """The width of the strip, fitted to a sample of the tokens; or why there is none."""
    router = exact.router
    if router.rule.weights.source == "sparsemixer":
        return None, "its weights follow from the order of k experts, and are not those of more"
    name, number = parse_smooth(request.smooth)
    few = [slice(start, start + TILE) for start in range(0, len(fitted.token), TILE)]
    selection = [exact.selection(exact.logits(fitted.inputs[tokens])) for tokens in few]
    below = whatif.gaps(np.concatenate(selection), router.rule.top_k)
    if name == "eps":
        return whatif.SmoothingBudget(number, float((below < number).sum()) / len(below)), ""
    try:
        return whatif.smoothing_budget(below, number), ""
    except ValueError as error:
        raise RouterRuleError(
            f"router {router.name}: --smooth {request.smooth}: {error}."
        ) from None


def _outputs(
    exact: ExactRouter,
    inputs: Float64[np.ndarray, "points hidden"],
    budget: whatif.SmoothingBudget | None,
    mixed: Mixture,
) -> list[Float64[np.ndarray, "points outputs"]]:
    """The output of the hard gate, and of the experts whose weight the smoothed one does not make
    0: every expert is read once for both.
    """
    logits, gates = exact.logits(inputs), []
    chosen = exact.chosen(logits)
    gates.append(np.zeros_like(logits))
    np.put_along_axis(gates[0], chosen.astype(int), exact.weights(inputs, logits, chosen), axis=1)
    if budget is not None:
        gates.append(exact.smooth_weights(inputs, budget.eps))
    weights = np.concatenate(gates)
    chosen = whatif.packed(weights != 0.0, weights)
    by = np.take_along_axis(weights, np.maximum(chosen, 0).astype(int), axis=1)
    points = np.tile(inputs, (len(gates), 1))
    return np.split(mixed(points, chosen, np.where(chosen >= 0, by, 0.0)), len(gates))


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

    Examples
    --------
    >>> import moegeom as mg
    >>> sample = "sample_ckpts/olmoe-balanced"
    >>> found = mg.continuity(f"{sample}/step_1500", f"{sample}/rec/step_1500", layers=0)
    >>> crossing = found.value.routers[0].crossing
    >>> [round(abs(gate.slope_near), 1) for gate in (crossing.hard, crossing.smooth)]
    [0.0, 1.0]
    """
    parse_smooth(request.smooth)
    if not 0.0 < request.radius < math.inf:
        raise UsageError(f"--radius {request.radius:g}: expected a length above 0.")
    opened, source = STUDY.open(request)
    if request.at is not None:
        refuse_tokens_beyond([request.at], source, "--at")
    reasons = {router.name: why_no_jumps(router, source.facts) for router in opened.recorded}
    chosen = [router for router in opened.recorded if not reasons[router.name]]
    left_out = [*opened.left_out, *((name, why) for name, why in reasons.items() if why)]
    if not chosen:
        raise UsageError(f"{left_out[0][0]}: {left_out[0][1]}.")
    announce_experts(
        dataclasses.replace(opened, chosen=tuple(chosen)), request.yes, watch, _most_read
    )
    kernels, routers, samples = load_kernels(request.backend), [], []
    at = None if request.at is None else np.array([request.at])
    for router in each(chosen, watch, _LINES + 1, is_paced=True):
        most = min(TOKENS, _NUMBERS // router.hidden_size)
        some = opened.sample(router, ("input", "logits", "chosen"), most, at)
        fitted = opened.sample(router, ("input",), SMALL_SAMPLE_TOKENS)
        experts = CountedExperts(open_expert_functions(opened.store, router))
        pace = SearchPace(watch, request.budget, f"{router.name}: lines")
        routers.append(router_continuity(router, some, fitted, kernels, experts, request, pace))
        samples.append(Sample(token=some.token, num_non_finite=some.num_non_finite))
    if request.out is not None:
        rows = ({"router": one.router, **row} for one in routers for row in rows_of(one.crossing))
        write_rows(request.out, rows, chosen)
    return Continuity(
        run=opened.facts(chosen),
        routers=tuple(routers),
        left_out=tuple(left_out),
        smooth=request.smooth,
        radius=request.radius,
        sample=opened.sample_counts(samples, request.at is not None),
        seed=request.seed,
        written=None if request.out is None else request.out.name,
    )


def _most_read(router: Router) -> int:
    """Experts that may be read where these are large: those of each line and of the one shown."""
    return (_LINES + 2) * (router.rule.top_k + 1)


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
            figures = {n: None if math.isnan(v) else v for n, v in zip(columns, one, strict=True)}
            yield {"what": "spread", **of_gate, "radius": radius, **figures}
