"""The two sides of an explanation, and one router of it: operators, noise, routing weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float, Float64, Int32, Int64
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, SourceFacts, TokenColumns, TokenSource
from moegeom.engine.choice import chosen_by, group_masked, recorded_logits, through_norm
from moegeom.engine.flipping import engine_logits
from moegeom.engine.plan import by_tile
from moegeom.engine.prepared import PreparedRouter, check_width, prepare, unavailable
from moegeom.engine.request import ComputeOptions
from moegeom.engine.sample import finite_tokens
from moegeom.engine.task import Task
from moegeom.geometry.noise import boundary_sigmas, upstream_noise
from moegeom.geometry.number_formats import rounded_to
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_BFLOAT16, UNIT_FLOAT32
from moegeom.geometry.rows import overlap_beyond_chance
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.table import load_kernels
from moegeom.router.edits import RouterInModel, edits_of
from moegeom.studies.explain.record import (
    EmptySlots,
    FlipNoise,
    InputChange,
    LayerEvidence,
    WeightRule,
)
from moegeom.studies.faults.operator import (
    AS_STORED,
    ChoiceValues,
    Proposal,
    Site,
    Values,
    of_sets,
    weights_of,
)
from moegeom.studies.faults.operators.damaged import foretold_share
from moegeom.studies.faults.scope import Where, best_region, region_of
from moegeom.studies.faults.score import SiteScores
from moegeom.tokens.rows import consecutive
from moegeom.tokens.stages import INPUT_STAGES
from moegeom.tokens.traces.alignment import RunB
from moegeom.variants.emulated import emulate

#: Tokens whose choices are compared at all routers, and those that are routed again: in all, and
#: the most and the least at each.
MOST_TOKENS, ROUTED, MOST_ROUTED, LEAST_ROUTED = 65_536, 65_536, 16_384, 4096

#: Tokens that are routed at once.
_AT_ONCE = 2 * TILE


@dataclass(frozen=True, eq=False)
class Batch:
    """Some matched tokens: ``row`` counts them; inputs where A recorded them."""

    row: Int64[np.ndarray, "tokens"]
    logits: Float[np.ndarray, "tokens experts"]
    values: Float[np.ndarray, "tokens hidden"] | None


@dataclass(frozen=True, eq=False)
class Sides:
    """A, B, and the tokens of A that B has: ``token`` ascending, with their ``columns``.

    ``num_matched`` are in both; of the first of these ``num_non_finite`` were left out.
    """

    source: TokenSource
    other: RunB
    token: Int64[np.ndarray, "tokens"]
    columns: TokenColumns
    kernels: Kernels
    num_matched: int
    num_non_finite: int = 0

    @property
    def has_other_inputs(self) -> bool:
        """Whether B recorded what its routers read."""
        return self.other.source.facts.stage in INPUT_STAGES

    def examined(self, num_routers: int) -> Int64[np.ndarray, "rows"]:
        """Matched tokens that are routed again at each of so many routers: whole documents, evenly
        spread, so that what stands beside a token is there too.
        """
        most = max(LEAST_ROUTED, min(MOST_ROUTED, ROUTED // max(num_routers, 1)))
        tokens = len(self.token)
        if tokens <= most:
            return np.arange(tokens)
        starts = np.flatnonzero(np.diff(self.columns.document, prepend=-2))
        stops = np.append(starts[1:], tokens)
        is_examined = np.zeros(tokens, bool)
        step = max(1, math.ceil(tokens / most))
        for start, stop in zip(starts[::step], stops[::step], strict=True):
            is_examined[start : min(stop, start + most - int(is_examined.sum()))] = True
        return np.flatnonzero(is_examined)

    def chosen(self, prepared: PreparedRouter) -> Int32[np.ndarray, "tokens k"]:
        """What A chose: as recorded, else as its router chooses."""
        name = prepared.router.name
        if self.source.facts.has_chosen:
            runs = consecutive(self.token)
            parts = [self.source.read_chosen(name, start, stop) for start, stop in runs]
            recorded = [part for part in parts if part is not None]
            if len(recorded) == len(parts):
                return np.concatenate(recorded)
        batches = self.batches(prepared, np.arange(len(self.token)))
        return np.concatenate([chosen_by(prepared, b.logits, self.kernels) for b in batches])

    def batches(self, prepared: PreparedRouter, rows: Int64[np.ndarray, "rows"]) -> Iterator[Batch]:
        """A's inputs and logits of some matched tokens, in runs of tiles of the recording."""
        task = Task(prepared, self.source, self.kernels)
        for start, those in by_tile(self.token[rows], _AT_ONCE):
            stop = int(self.token[rows[those]].max()) + 1
            batch = recorded_logits(task, start, stop)
            at = self.token[rows[those]] - start
            values, logits = batch.values, batch.logits
            if len(at) < len(logits):  # else every token, in order
                values = None if values is None else values[at]
                logits = logits[at]
            yield Batch(rows[those], logits, values)

    def other_values(
        self, router: Router, row: Int64[np.ndarray, "rows"]
    ) -> Float[np.ndarray, "rows hidden"]:
        """B's router inputs for some matched tokens, behind the norm."""
        source, values = self.other.source, self.other_recorded(router.name, row)
        check_width(router, source.facts.stage, values.shape[1], source.facts.name)
        if source.facts.stage == "router_input":
            return values
        return through_norm(values, router, source.facts.name)

    def other_recorded(
        self, router: str, row: Int64[np.ndarray, "rows"], output: str = ""
    ) -> Float[np.ndarray, "rows width"]:
        """B's inputs or logits as they are recorded, or an output, for some matched tokens."""
        source, there = self.other.source, consecutive(self.other.token[self.token[row]])
        if not output:
            return np.concatenate([source.read_values(router, *run) for run in there])
        parts = (source.read_output(router, output, *run) for run in there)
        return np.concatenate([part for part in parts if part is not None]).astype(np.float64)


def routed_choices(
    source: TokenSource, prepared: PreparedRouter, kernels: Kernels
) -> Int32[np.ndarray, "tokens k"]:
    """What the router chooses for all tokens of a recording of inputs or logits."""
    task = Task(prepared, source, kernels)
    parts = []
    for start in range(0, source.facts.num_tokens, _AT_ONCE):
        batch = recorded_logits(task, start, min(start + _AT_ONCE, source.facts.num_tokens))
        parts.append(chosen_by(prepared, batch.logits, kernels))
    return np.concatenate(parts)


def sides_of(
    source: TokenSource, other: RunB, routers: Sequence[str], options: ComputeOptions
) -> Sides:
    """The sides, limited to the first matched tokens that are examined.

    Raises
    ------
    RecordingError
        When none of them counts.
    """
    total = source.facts.num_tokens
    columns = source.read_columns(0, total)
    every = np.flatnonzero((other.token >= 0) & options.counted(columns))
    matched = every[:MOST_TOKENS]
    token = finite_tokens(source, routers, matched, options)
    there = other.token[token]
    token = token[np.isin(there, finite_tokens(other.source, routers, np.sort(there), options))]
    if not len(token):
        raise RecordingError(
            f"{source.facts.name}: none of its {number_of(total, 'token')} that the other run has "
            "counts: each is one of the first of its document, or not finite.",
            "Leave out fewer: --exclude-first.",
        )
    kernels, lost = load_kernels(options.backend), len(matched) - len(token)
    return Sides(source, other, token, columns.at(token), kernels, len(every), lost)


# --------------------------------------------------------------------------------------- one router
#: Bytes of inputs that stay in memory, so that they are read once.
_MOST_INPUTS = 2**30


@dataclass(frozen=True, eq=False)
class MatchedChoices:
    """What both sides chose at one router, and which tokens agreed at all earlier ones.

    ``matching`` is, for each expert of A, the number of B that fits its choices best, by how often
    one chose the one and the other the other, ``common``. B's slots that are empty hold what A
    chose.
    """

    prepared: PreparedRouter
    mine: Int32[np.ndarray, "tokens k"]
    other: Int32[np.ndarray, "tokens k"]
    is_clean: Bool[np.ndarray, "tokens"]
    agrees: Bool[np.ndarray, "tokens"]
    matching: Int64[np.ndarray, "experts"]
    common: Int64[np.ndarray, "experts experts"]
    is_empty: Bool[np.ndarray, "tokens k"]


@dataclass(frozen=True, eq=False)
class ReadySite:
    """A router made ready: its site, the inputs of its tokens, how near boundaries are, how far
    B's inputs are from A's, and why nothing could be routed again.
    """

    site: Site
    values: Values
    nearest: NearestBoundaries | None
    apart: InputsApart | None
    reason: str


def look(
    choices: Sequence[MatchedChoices],
    number: int,
    sides: Sides,
    other: Router | None,
    rows: Int64[np.ndarray, "rows"],
    values_at: Callable[[int], Values],
) -> ReadySite:
    """The site of one router: logits of B's inputs, else A's, for these tokens, read once."""
    own = choices[number]
    prepared, reason = own.prepared, _why_not_routed(own.prepared, sides)
    mine, theirs = own.mine[rows], own.other[rows]
    stage = sides.source.facts.stage
    has_inputs = not reason and stage != "logits"
    router = prepared.router
    if not has_inputs and router.rule.is_affine:  # recorded logits hold their bias
        router = dataclasses.replace(router, selection_bias=None)
    as_stored = emulate(router, AS_STORED) if not reason else None
    nearest, apart, logits, inputs = None, None, [], None
    if as_stored is not None:
        lengths, own_logits, stop = np.full(len(rows), np.nan), [], 0
        if sides.has_other_inputs and stage in INPUT_STAGES:
            apart = InputsApart(np.zeros(len(rows)), {*_FORMATS}, {_FORMATS[-1]})
        if has_inputs and len(rows) * len(choices) * router.hidden_size * 4 <= _MOST_INPUTS:
            inputs = np.empty((len(rows), router.hidden_size), np.float32)
        for batch in sides.batches(prepared, rows):
            there = slice(stop, stop := stop + len(batch.row))
            own_logits.append(batch.logits)
            values = batch.values
            if values is not None:
                lengths[there] = sides.kernels["input_norm"](values)
            if apart is not None and batch.values is not None:
                values = sides.other_values(prepared.router, batch.row)
                apart.note(there, sides, batch.values, values)
                logits.append(engine_logits(as_stored, as_stored.inputs(values)))
            if values is not None and inputs is not None:
                inputs[there] = values
        of_a = np.concatenate(own_logits)
        nearest = NearestBoundaries.of(prepared, of_a, lengths, sides.source.facts)
        all_logits = np.concatenate(logits) if logits else of_a
        scores = as_stored.compared(all_logits)
        selection, _ = group_masked(router.rule, scores, sides.kernels)
    else:
        all_logits = of_sets(mine, len(own.matching))
        scores = selection = all_logits
    site = Site(
        router=router,
        number=number,
        routers=[choice.prepared.router for choice in choices],
        other=other,
        logits=all_logits,
        scores=scores,
        selection=selection,
        mine=mine,
        theirs=theirs,
        columns=sides.columns.at(rows),
        matching=own.matching,
        kernels=sides.kernels,
        has_inputs=has_inputs,
        has_logits=not reason,
        recorded=_recorded(sides, prepared.router, rows) if has_inputs else None,
        chosen_at=lambda place: choices[place].mine[rows],
        values_at=values_at,
        is_of_b=sides.has_other_inputs,
        decides=own.is_clean[rows] | sides.has_other_inputs,
    )
    return ReadySite(site, _values(sides, own, rows, inputs), nearest, apart, reason)


def _recorded(sides: Sides, router: Router, rows: Int64[np.ndarray, "rows"]) -> ChoiceValues | None:
    """B's logits, else the weights that it gave to what it chose; None where it recorded neither.

    Nothing where logits hold a bias that weights do not, or experts that always run share the sum.
    """
    facts = sides.other.source.facts
    if router.projection is not None or router.shared_rows is not None:
        return None
    if facts.stage == "logits" and not (router.rule.is_affine and router.rule.has_selection_bias):
        return ChoiceValues(sides.other_recorded(router.name, rows).astype(np.float64), True)
    if "routing_weights" in facts.outputs and router.rule.top_k > 1:
        return ChoiceValues.of_weights(sides.other_recorded(router.name, rows, "routing_weights"))
    return None


def _values(
    sides: Sides,
    own: MatchedChoices,
    rows: Int64[np.ndarray, "rows"],
    inputs: Float[np.ndarray, "rows hidden"] | None,
) -> Values:
    """Inputs of some of the rows: from memory where they fit, else read again."""
    if inputs is not None:
        inputs.flags.writeable = False
        return lambda some: inputs[some]

    def read(some: np.ndarray) -> np.ndarray | None:
        if sides.has_other_inputs:
            return sides.other_values(own.prepared.router, rows[some])
        parts = [batch.values for batch in sides.batches(own.prepared, rows[some])]
        stored = [part for part in parts if part is not None]
        return np.concatenate(stored) if len(stored) == len(parts) else None

    return read


def note_under(
    ready: ReadySite, candidate: Proposal, is_inside: Bool[np.ndarray, "rows"], sides: Sides
) -> None:
    """Updates the boundary distances of the tokens inside to those under a believed fault.

    Nothing where it has no router of its own.
    """
    own, routed = ready.nearest, candidate.routed
    if own is None or routed is None or not ready.site.has_inputs:
        return
    router = dataclasses.replace(routed.router, selection_bias=routed.selection_bias)
    prepared, rows = prepare(router), np.arange(len(is_inside))
    logits, lengths = np.zeros_like(own.logits), np.full(len(rows), np.nan)
    for start in range(0, len(rows), _AT_ONCE):
        there = slice(start, start + _AT_ONCE)
        if not is_inside[there].any():
            continue
        values = ready.values(rows[there])
        if values is None:
            return
        seen = values
        if candidate.inputs is not None:
            seen = candidate.inputs(ready.site, rows[there], values)
        logits[there] = engine_logits(routed, routed.inputs(seen))
        lengths[there] = sides.kernels["input_norm"](np.ascontiguousarray(seen, np.float32))
    boundaries = NearestBoundaries.of(prepared, logits, lengths, sides.source.facts)
    if boundaries.distance.shape != own.distance.shape:
        return
    boundaries.note(np.flatnonzero(is_inside), prepared, sides)
    own.distance[is_inside] = boundaries.distance[is_inside]
    own.is_noted[is_inside] = True


def layer_evidence(
    choices: MatchedChoices,
    sides: Sides,
    ready: ReadySite,
    scores: SiteScores,
    rows: Int64[np.ndarray, "rows"],
    is_met: Bool[np.ndarray, "rows"],
    is_open: bool,
) -> LayerEvidence:
    """Agreement, noise and weights at one router; ``is_met`` marks sets the faults reproduce.

    What other rows foretell is looked at where nothing else explains what begins here, ``is_open``.
    """
    prepared, agrees, clean = choices.prepared, choices.agrees, choices.is_clean
    noise = None
    if ready.nearest is not None:
        # noise is fitted to tokens that agreed until then
        ready.nearest.note(np.flatnonzero(clean[rows]), prepared, sides)
        noise = flip_noise(ready.nearest, sides, prepared, rows, is_met, clean[rows])
    own = np.arange(len(choices.matching))
    return LayerEvidence(
        router=prepared.router.name,
        num_tokens=len(agrees),
        agreement=float(agrees.mean()),
        num_clean=int(clean.sum()),
        num_routed=len(rows) if ready.site.has_logits else 0,
        num_tried=scores.num_tried,
        num_differ=int((~scores.is_met).sum()),
        reproduced=float(scores.is_met.mean()),
        bits=float(scores.base.sum()),
        num_renamed=int((choices.matching != own).sum()),
        noise=noise,
        weights=weight_rule(ready, sides, rows, agrees[rows]),
        inputs=input_change(ready, sides, rows, clean[rows]),
        reason=ready.reason,
        own_reproduced=scores.own_reproduced,
        beyond_chance=overlap_beyond_chance(choices.common, own, len(agrees)),
        beyond_chance_renamed=overlap_beyond_chance(choices.common, choices.matching, len(agrees)),
        by_own_logits=ready.site.met_by_own_logits(ready.site.place),
        empty=_empty(choices, sides, ready, rows),
        foretold=foretold_share(ready.site) if is_open else None,
    )


#: Rows with empty slots from which it can be told which they are; numbers that a search for the
#: largest begins with, and share of these rows whose last score is below one.
_SOME_EMPTY, _STARTS, _BELOW = 20, (0.0, -1.0), 0.95


def _empty(
    choices: MatchedChoices, sides: Sides, ready: ReadySite, rows: Int64[np.ndarray, "rows"]
) -> EmptySlots | None:
    """Slots in which B holds no expert, or one of no weight that the rule gives some."""
    site, is_empty = ready.site, choices.is_empty[rows]
    is_written = bool(is_empty.any())
    if not is_written and "routing_weights" in sides.other.source.facts.outputs:
        is_empty = sides.other_recorded(site.router.name, rows, "routing_weights") == 0.0
    has_some = np.asarray(is_empty.any(axis=1))
    number = int(has_some.sum())
    if number < _FEW:
        return None
    is_whole, is_below = is_empty.all(axis=1), False
    clean = choices.is_clean[rows] & ~is_whole
    there = Where.of(sides.columns.at(rows), sides.token[rows])
    region, _ = region_of(has_some, there)
    lacks = has_some[region.is_inside]
    if site.has_logits and lacks.sum() >= _SOME_EMPTY and not lacks.all():
        # a row lacks experts where the last of them has a score that is too low
        last = np.take_along_axis(site.scores, site.mine.astype(np.int64), axis=1).min(axis=1)
        last = last[region.is_inside]
        is_below = any(
            (last[lacks] < start).mean() >= _BELOW and (last >= start).mean() > 1.0 - _BELOW
            for start in _STARTS
        )
    return EmptySlots(
        number,
        int(is_whole.sum()),
        is_written,
        float(choices.agrees[rows][clean].mean()) if clean.any() else 1.0,
        is_below,
        region.text,
    )


def _why_not_routed(prepared: PreparedRouter, sides: Sides) -> str:
    """Why rows, inputs and rule cannot be tried; empty where they can."""
    stage = sides.source.facts.stage
    if prepared.router.projection is not None:
        return "routers behind a projection are compared by their sets only"
    if stage in ("ids", "top_logits"):
        return (
            f"rows and inputs need router inputs or all logits; A holds {stage.replace('_', ' ')}"
        )
    return ""


#: Tokens whose weights are compared.
_COMPARED = 4096


#: Bits of a weight of 0 that the rule does not give.
_ZERO_BITS = 10.0

#: Relative error of weights that are stored in bfloat16: the unit. Share of the tokens that are
#: right where most are not.
_FITS, _RIGHT = 2.0**-8, 0.1


def weight_rule(
    ready: ReadySite,
    sides: Sides,
    rows: Int64[np.ndarray, "rows"],
    agrees: Bool[np.ndarray, "rows"],
) -> WeightRule | None:
    """B's recorded weights against those of rules, on the inputs at hand.

    None where B recorded none, or A no logits.
    """
    site, facts = ready.site, sides.other.source.facts
    router = site.router
    if "routing_weights" not in facts.outputs or not site.has_logits:
        return None
    if router.projection is not None or router.shared_rows is not None:
        return None
    some = np.flatnonzero(agrees)[:_COMPARED]
    if not len(some):
        return None
    logits, chosen = site.logits[some], site.theirs[some]
    theirs = sides.other_recorded(router.name, rows[some], "routing_weights")
    plain = weights_of(router, logits, chosen)
    error, is_far = _error(theirs, plain), _are_far(theirs, plain)
    is_zero = (theirs == 0.0) & (plain > 0.0)
    zeros_last = _last_share(is_zero, plain)
    outlying, where = bool(_FEW <= is_far.sum() <= len(is_far) - _FEW), ""
    if outlying:  # the others follow the rule
        saved = np.where(is_far, _WORTH, -1.0)
        there = Where.of(sides.columns.at(rows[some]), sides.token[rows[some]])
        where = best_region(saved, there).text
        logits, chosen, theirs, plain = (x[is_far] for x in (logits, chosen, theirs, plain))
    errors = {
        edit.text: _error(theirs, weights_of(edit.router, logits, chosen))
        for edit in edits_of(RouterInModel(router), {"weights"})
    }
    errors["in another order than their experts"] = _error(*(np.sort(x) for x in (theirs, plain)))
    times = float(np.median(np.divide(theirs, plain, out=np.ones_like(plain), where=plain > 0.0)))
    errors[f"{times:.3g} times as large"] = _error(theirs, times * plain)
    with_bias = None
    if router.selection_bias is not None and router.selection_bias.any():
        with_bias = _error(theirs, weights_of(router, logits, chosen, leaks=True))
    # of rules that fit as well as stored weights can tell, the first: what is fitted comes last
    nearest = min(errors, key=lambda name: max(errors[name], _FITS))
    off = _error(theirs, plain)
    left = max(min(errors[nearest], np.inf if with_bias is None else with_bias), _FITS)
    gain = off / left if 0.0 < off < np.inf else 1.0
    return WeightRule(
        len(rows),
        error,
        with_bias,
        nearest,
        errors[nearest],
        zeros=float(is_zero.mean()),
        zeros_last=zeros_last,
        outlying=float(is_far.mean()) if outlying else 0.0,
        outlying_error=off if outlying else 0.0,
        where=where,
        # of numbers that are so much nearer to those of the rule
        bits=_ZERO_BITS * float(is_zero.sum()) + max(plain.size * math.log2(gain), 0.0),
    )


def _last_share(
    is_zero: Bool[np.ndarray, "tokens k"], plain: Float64[np.ndarray, "tokens k"]
) -> float:
    """Of the tokens with weights of 0 the share where these are the smallest by the rule."""
    some = is_zero.any(axis=1) & ~is_zero.all(axis=1)
    zero, of_rule = is_zero[some], plain[some]
    largest = np.where(zero, of_rule, -np.inf).max(axis=1)
    least = np.where(zero, np.inf, of_rule).min(axis=1)
    return float((largest <= least).mean()) if some.any() else 0.0


def _are_far(
    theirs: Float64[np.ndarray, "tokens k"], plain: Float64[np.ndarray, "tokens k"]
) -> Bool[np.ndarray, "tokens"]:
    """Tokens whose weights are outliers in their error; where most are off, those that are."""
    size = np.sqrt((plain**2).mean(axis=1))
    apart = np.sqrt(((theirs - plain) ** 2).mean(axis=1))
    relative = np.divide(apart, size, out=np.zeros_like(apart), where=size > 0.0)
    usual = float(np.median(relative))
    usual = usual if usual <= _FAR * _FITS else float(np.quantile(relative, _RIGHT))
    return relative > max(_FITS, _FAR * usual)


def _error(theirs: np.ndarray, ours: np.ndarray) -> float:
    """``rms(difference) / rms(ours)``; infinite where that is 0 or not finite."""
    size = float((ours**2).mean())
    if size == 0.0 or not np.isfinite(size):
        return np.inf
    return float(np.sqrt(((theirs - ours) ** 2).mean() / size))


#: Nearest boundaries of a token that are looked at.
_BOUNDARIES = 4

#: Probability below which noise has not flipped a token, and examples that are named.
_IMPOSSIBLE, _EXAMPLES = 1e-6, 3


@dataclass(frozen=True, eq=False)
class NearestBoundaries:
    """Distances to the nearest boundaries of tokens that are routed, over the rms of their input.

    Of tokens with these ``logits`` and inputs so long (nan: not known), noted for those that are
    asked for; a curved rule has one lower bound for each token, and an unknown one no column.
    ``num_boundaries`` are all boundaries of a token.
    """

    logits: Float[np.ndarray, "rows experts"]
    lengths: Float64[np.ndarray, "rows"]
    distance: Float64[np.ndarray, "rows boundaries"]
    is_noted: Bool[np.ndarray, "rows"]
    num_boundaries: int

    @staticmethod
    def of(
        prepared: PreparedRouter,
        logits: Float[np.ndarray, "rows experts"],
        lengths: Float64[np.ndarray, "rows"],
        facts: SourceFacts,
    ) -> NearestBoundaries:
        """Nothing noted yet of tokens that are recorded so."""
        experts, k = prepared.router.num_experts, prepared.router.rule.top_k
        boundaries, columns = k * (experts - k), 0
        if "distance" not in unavailable(prepared.router, facts):
            columns = min(boundaries, _BOUNDARIES) if prepared.router.rule.is_affine else 1
        distance = np.full((len(lengths), columns), np.nan)
        return NearestBoundaries(
            logits, lengths, distance, np.zeros(len(lengths), bool), boundaries
        )

    def note(self, rows: Int64[np.ndarray, "some"], prepared: PreparedRouter, sides: Sides) -> None:
        """Distances of those of these tokens that have none yet, where their lengths are known."""
        columns = self.distance.shape[1]
        rows = rows[~(self.is_noted[rows] | np.isnan(self.lengths[rows]))]
        if not columns or not len(rows):
            return
        for start in range(0, len(rows), _AT_ONCE):
            some = rows[start : start + _AT_ONCE]
            logits = self.logits[some]
            chosen = chosen_by(prepared, logits, sides.kernels)
            if prepared.rows is not None:
                distances = boundary_sigmas(logits, chosen, prepared.rows)
                distances = np.partition(distances, columns - 1, axis=1)[:, :columns]
            else:
                lower, _, _ = sides.kernels["curved_distance"](
                    logits, chosen, prepared.curved, on_rays=False
                )
                distances = lower[:, None]
            rms = self.lengths[some] / np.sqrt(prepared.router.hidden_size)
            with np.errstate(divide="ignore", invalid="ignore"):
                self.distance[some] = distances / rms[:, None]
        self.is_noted[rows] = True


def flip_noise(
    nearest: NearestBoundaries,
    sides: Sides,
    prepared: PreparedRouter,
    rows: Int64[np.ndarray, "tokens"],
    agrees: Bool[np.ndarray, "tokens"],
    is_clean: Bool[np.ndarray, "tokens"],
) -> FlipNoise | None:
    """Noise fitted to the first flips at this router; None without distances."""
    if not nearest.distance.shape[1] or sides.source.facts.stage not in INPUT_STAGES:
        return None
    fits = is_clean & ~np.isnan(nearest.distance).any(axis=1)
    flipped = ~agrees
    noise = upstream_noise(nearest.distance[fits], flipped[fits])
    if np.isnan(noise.scale):
        return None
    some = np.flatnonzero(fits & flipped)
    least = nearest.distance[some].min(axis=1)
    # the nearest boundary, as often as there are boundaries, bounds the chance for all of them
    chance = nearest.num_boundaries * noise.chance(least[:, None])
    is_beyond = (chance < _IMPOSSIBLE) & (least > 0.0)
    beyond, least = some[is_beyond], least[is_beyond]
    # the farthest ones are the clearest
    named = rows[beyond[np.argsort(-least)][:_EXAMPLES]]
    examples = tuple(
        (int(sides.columns.document[row]), int(sides.columns.position[row])) for row in named
    )
    return FlipNoise(
        scale=noise.scale,
        spread=noise.spread,
        roundings=noise.scale / (ROUNDING_RMS * UNIT_BFLOAT16),
        observed=noise.observed,
        expected=noise.expected,
        expected_error=noise.expected_error,
        num_beyond=len(beyond) if noise.excess else 0,
        examples=examples if noise.excess else (),
    )


#: Formats that inputs may be rounded to, the coarsest first; the last one is the finest.
_FORMATS = ("bfloat16", "float16", "tf32")


@dataclass(frozen=True, eq=False)
class InputsApart:
    """Distance of A's and B's inputs by token over the length of A's, filled batch by batch.

    ``rounded`` are the formats whose numbers all of B's inputs are, ``plain`` those that A's are.
    """

    relative: Float64[np.ndarray, "rows"]
    rounded: set[str]
    plain: set[str]

    @property
    def size(self) -> float:
        """The rms over tokens, which no long one hides from."""
        return float(np.sqrt((self.relative**2).sum() / max(len(self.relative), 1)))

    def note(
        self,
        there: slice,
        sides: Sides,
        mine: Float[np.ndarray, "tokens hidden"],
        theirs: Float[np.ndarray, "tokens hidden"],
    ) -> None:
        """Tokens with these inputs."""
        norm = sides.kernels["input_norm"]
        apart = norm(np.subtract(theirs, mine, dtype=np.float32))
        length = norm(np.asarray(mine, np.float32))
        np.divide(apart, length, out=self.relative[there], where=length > 0.0)
        for formats, values in ((self.rounded, theirs), (self.plain, mine)):
            for name in tuple(formats):
                if not np.array_equal(rounded_to(values, name), values):
                    formats.remove(name)


def input_change(
    ready: ReadySite,
    sides: Sides,
    rows: Int64[np.ndarray, "rows"],
    is_clean: Bool[np.ndarray, "rows"],
) -> InputChange | None:
    """How the inputs of A and B differ; None where one side did not record them."""
    if ready.apart is None:
        return None
    relative, change = ready.apart.relative, ready.apart.size
    formats = () if ready.apart.plain else ready.apart.rounded
    rounded = next((name for name in _FORMATS if name in formats), "")
    middle = float(np.median(relative[is_clean])) if is_clean.any() else 0.0
    # numbers of few bits are equal or differ by a whole rounding
    finest = UNIT_BFLOAT16 if ready.apart.plain else UNIT_FLOAT32
    far = is_clean & (relative > _FAR * max(middle, finest))
    if not _FEW <= far.sum() <= 0.5 * is_clean.sum():
        return InputChange(change, rounded)
    # a token that is far is worth what naming one of a few thousand costs
    saved = np.where(is_clean, np.where(far, _WORTH, -1.0), 0.0)
    where = best_region(saved, Where.of(sides.columns.at(rows), sides.token[rows])).text
    times = float(np.median(relative[far])) / middle if middle > 0.0 else np.inf
    return InputChange(change, rounded, float(far.sum() / is_clean.sum()), times, where)


#: A token is far where its inputs differ so many times as much as those of the median token, and
#: so many have to be; bits that each is worth. Heuristic: rounding spreads by a factor of 2 or so.
_FAR, _FEW, _WORTH = 8.0, 10, 12.0
