"""One router of an explanation: each hypothesis tried on the inputs at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int32, Int64

from moegeom.core.router import Router
from moegeom.core.tokens import SourceFacts
from moegeom.engine.choice import chosen_by
from moegeom.engine.prepared import PreparedRouter, unavailable
from moegeom.geometry.noise import boundary_sigmas
from moegeom.geometry.noise_size import noise_between, upstream_noise
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_BFLOAT16
from moegeom.geometry.rows import overlap_beyond_chance
from moegeom.geometry.selection import (
    SCORES,
    TIES,
    mapped_logits,
    routing_weights,
    selection_scores,
)
from moegeom.studies.explain.record import FlipNoise, LayerEvidence, Tried, WeightRule
from moegeom.studies.explain.sides import Sides
from moegeom.studies.explain.trials import MatchedChoices, Trial, inputs, trials
from moegeom.tokens.stages import INPUT_STAGES, VALUE_STAGES


def layer_evidence(
    choices: MatchedChoices,
    sides: Sides,
    against: Router | None,
    is_first: bool,
    advance: Callable[[int], None],
) -> LayerEvidence:
    """Agreement, hypotheses and weights at one router; more tokens at the first one."""
    prepared, agrees, clean = choices.prepared, choices.agrees, choices.is_clean
    reason, rows = _untold(prepared, sides), sides.routed(is_first)
    tried: tuple[Tried, ...] = ()
    noise = None
    if not reason:
        candidates = list(trials(choices, sides, against))
        share = np.zeros((len(candidates), len(rows)))
        credit = np.zeros((len(TIES), *share.shape))
        nearest = NearestBoundaries.of(prepared, len(rows), sides.source.facts)
        for there, batch, values in inputs(choices, sides, rows):
            nearest.note(there, prepared, sides, batch.logits, batch.norm)
            for number, trial in enumerate(candidates):
                sets = trial.reproduces(
                    trial.logits(values, batch.logits), choices.other[batch.row], sides.kernels
                )
                share[number, there] = sets.is_admitted
                for way, ties in enumerate(TIES):
                    credit[way, number, there] = sets.credit(ties)
            advance(len(batch.row))
        tried = _judged(candidates, share, credit)
        noise = flip_noise(nearest, sides, prepared, rows, agrees[rows], clean[rows])
    own = np.arange(len(choices.matching))
    return LayerEvidence(
        router=prepared.router.name,
        num_tokens=len(agrees),
        agreement=float(agrees.mean()),
        num_clean=int(clean.sum()),
        num_tried=len(rows) if tried else 0,
        tried=tried,
        num_renamed=int((choices.matching != own).sum()),
        noise=noise,
        weights=weight_rule(prepared, sides, agrees, choices.other),
        reason=reason,
        beyond_chance=overlap_beyond_chance(choices.common, own, len(agrees)),
        beyond_chance_renamed=overlap_beyond_chance(choices.common, choices.matching, len(agrees)),
    )


def left_over(
    choices: MatchedChoices, sides: Sides, against: Router | None, name: str, is_first: bool
) -> FlipNoise | None:
    """Noise that makes what a hypothesis leaves over; None where it does not apply."""
    trial = next((t for t in trials(choices, sides, against) if t.name == name), None)
    if trial is None:
        return None
    rows, prepared = sides.routed(is_first), trial.prepared()
    nearest, agrees = (
        NearestBoundaries.of(prepared, len(rows), sides.source.facts),
        np.zeros(len(rows), dtype=bool),
    )
    for there, batch, values in inputs(choices, sides, rows):
        logits = trial.logits(values, batch.logits)
        sets = trial.reproduces(logits, choices.other[batch.row], sides.kernels)
        agrees[there] = sets.is_admitted
        nearest.note(there, prepared, sides, logits, batch.norm)
    return flip_noise(nearest, sides, prepared, rows, agrees, choices.is_clean[rows])


def _untold(prepared: PreparedRouter, sides: Sides) -> str:
    """Why no hypothesis can be tried; empty where they can."""
    stage = sides.source.facts.stage
    if prepared.router.projection is not None:
        return "routers behind a projection are compared only"
    if stage in ("ids", "top_logits"):
        return f"hypotheses need router inputs or all logits; A holds {stage.replace('_', ' ')}"
    return ""


def _judged(
    candidates: Sequence[Trial],
    share: Float64[np.ndarray, "trials tokens"],
    credit: Float64[np.ndarray, "ways trials tokens"],
) -> tuple[Tried, ...]:
    """How each did against nothing changed, the first, on the same tokens.

    Ties are broken in whichever way fits best: which one an engine has is not known.
    """
    base = credit[credit[:, 0].sum(axis=1).argmax(), 0]
    missing = float((1.0 - base).sum())
    found = []
    for number, trial in enumerate(candidates):
        way = int(credit[:, number].sum(axis=1).argmax())
        gain = credit[way, number] - base
        spread = float(np.sqrt((gain**2).sum()))
        found.append(
            Tried(
                name=trial.name,
                text=trial.text,
                cause=trial.cause,
                ties=TIES[way],
                share=float(share[number].mean()),
                credit=float(credit[way, number].mean()),
                repaired=float(gain.sum()) / missing if missing else 0.0,
                standing=float(gain.sum()) / spread if spread else 0.0,
            )
        )
    return tuple(found)


#: Tokens whose weights are compared.
_COMPARED = 4096

#: Another rule for the weights, from the router; None where it is the same rule.
_Other = Callable[[Router], Router | None]


def _renormalised(router: Router) -> Router:
    weights = router.rule.weights
    changed = dataclasses.replace(weights, renormalise=not weights.renormalise)
    return _with(router, weights=changed)


def _unscaled(router: Router) -> Router | None:
    weights = router.rule.weights
    if weights.scale == 1.0:
        return None
    return _with(router, weights=dataclasses.replace(weights, scale=1.0))


def _with(router: Router, **changes: object) -> Router:
    return dataclasses.replace(router, rule=dataclasses.replace(router.rule, **changes))


#: Rules that an engine may have instead, in words.
_RULES: Mapping[str, _Other] = {
    "not renormalised as the rule says": _renormalised,
    "without the scaling factor": _unscaled,
}


def weight_rule(
    prepared: PreparedRouter,
    sides: Sides,
    agrees: Bool[np.ndarray, "tokens"],
    other: Int32[np.ndarray, "tokens k"],
) -> WeightRule | None:
    """B's recorded weights against those of rules; None where it recorded none, or A no logits."""
    router, facts = prepared.router, sides.other.source.facts
    if "routing_weights" not in facts.outputs or sides.source.facts.stage not in VALUE_STAGES:
        return None
    if router.projection is not None or router.shared_rows is not None:
        return None
    rows = np.flatnonzero(agrees)[:_COMPARED]
    if not len(rows):
        return None
    logits = np.concatenate([batch.logits for batch in sides.batches(prepared, rows)])
    theirs = sides.other_output(router.name, "routing_weights", rows)
    chosen = other[rows].astype(np.int64)
    plain = _weights(router, logits, chosen)
    found = {
        name: _error(theirs, _weights(changed, logits, chosen))
        for name, change in _RULES.items()
        if (changed := change(router)) is not None
    }
    with_bias = None
    if router.selection_bias is not None and router.selection_bias.any():
        with_bias = _error(theirs, _weights(router, logits, chosen, leaks=True))
    nearest = min(found, key=lambda name: found[name])
    return WeightRule(len(rows), _error(theirs, plain), with_bias, nearest, found[nearest])


def _weights(
    router: Router,
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Float[np.ndarray, "tokens k"],
    leaks: bool = False,
) -> Float64[np.ndarray, "tokens k"]:
    """Weights of the chosen experts; with the selection bias in their scores if it leaks."""
    rule = router.rule
    mapped = mapped_logits(logits, rule.logit_map)
    scores = SCORES[rule.score](mapped)
    if leaks:
        scores = selection_scores(logits, rule, router.selection_bias)
    found = routing_weights(mapped, scores, chosen, rule.weights)
    return found if router.expert_scale is None else found * router.expert_scale[chosen]


def _error(theirs: np.ndarray, ours: np.ndarray) -> float:
    """Rms of the difference over the rms of ours."""
    size = float((ours**2).mean())
    return float(np.sqrt(((theirs - ours) ** 2).mean() / size)) if size else np.inf


#: Nearest boundaries of a token that are looked at.
_BOUNDARIES = 4

#: Probability below which noise has not flipped a token, and examples that are named.
_IMPOSSIBLE, _EXAMPLES = 1e-6, 3

#: Tokens whose inputs are compared, where both sides recorded them.
_MEASURED = 2048


@dataclass(frozen=True, eq=False)
class NearestBoundaries:
    """Distances to the nearest boundaries of tokens that are routed, over the rms of their input.

    Filled batch by batch; a curved rule has one lower bound for each token, and an unknown one no
    column. ``num_boundaries`` are all boundaries of a token.
    """

    distance: Float64[np.ndarray, "rows boundaries"]
    num_boundaries: int

    @staticmethod
    def of(prepared: PreparedRouter, num_rows: int, facts: SourceFacts) -> NearestBoundaries:
        """Nothing noted yet of tokens that are recorded so."""
        experts, k = prepared.router.num_experts, prepared.router.rule.top_k
        boundaries, columns = k * (experts - k), 0
        if "distance" not in unavailable(prepared.router, facts):
            columns = min(boundaries, _BOUNDARIES) if prepared.router.rule.is_affine else 1
        return NearestBoundaries(np.full((num_rows, columns), np.nan), boundaries)

    def note(
        self,
        there: slice,
        prepared: PreparedRouter,
        sides: Sides,
        logits: Float[np.ndarray, "tokens experts"],
        norm: Float64[np.ndarray, "tokens"] | None,
    ) -> None:
        """Tokens with these logits; nothing where the lengths of their inputs are not known."""
        columns = self.distance.shape[1]
        if not columns or norm is None:
            return
        chosen = chosen_by(prepared, logits, sides.kernels)
        if prepared.rows is not None:
            found = boundary_sigmas(logits, chosen, prepared.rows)
            found = np.partition(found, columns - 1, axis=1)[:, :columns]
        else:
            lower, _, _ = sides.kernels["curved_distance"](logits, chosen, prepared.curved)
            found = lower[:, None]
        rms = norm / np.sqrt(prepared.router.hidden_size)
        with np.errstate(divide="ignore", invalid="ignore"):
            self.distance[there] = found / rms[:, None]


def flip_noise(
    nearest: NearestBoundaries,
    sides: Sides,
    prepared: PreparedRouter,
    rows: Int64[np.ndarray, "tokens"],
    agrees: Bool[np.ndarray, "tokens"],
    is_clean: Bool[np.ndarray, "tokens"],
) -> FlipNoise | None:
    """Noise that fits what flipped for the first time at this router; None without distances."""
    if not nearest.distance.shape[1] or sides.source.facts.stage not in INPUT_STAGES:
        return None
    fits = is_clean & ~np.isnan(nearest.distance).any(axis=1)
    flipped = ~agrees
    found = upstream_noise(nearest.distance[fits], flipped[fits])
    if np.isnan(found.scale):
        return None
    least = nearest.distance.min(axis=1)
    # the nearest boundary, as often as there are boundaries, bounds the chance for all of them
    chance = nearest.num_boundaries * found.chance(least[:, None])
    beyond = np.flatnonzero(fits & flipped & (chance < _IMPOSSIBLE) & (least > 0.0))
    # the farthest ones are the clearest
    named = rows[beyond[np.argsort(-least[beyond])][:_EXAMPLES]]
    examples = tuple(
        (int(sides.columns.document[row]), int(sides.columns.position[row])) for row in named
    )
    return FlipNoise(
        scale=found.scale,
        spread=found.spread,
        roundings=found.scale / (ROUNDING_RMS * UNIT_BFLOAT16),
        observed=found.observed,
        expected=found.expected,
        expected_error=found.expected_error,
        num_beyond=len(beyond) if found.excess else 0,
        examples=examples if found.excess else (),
        measured=_measured(sides, prepared, rows),
    )


def _measured(sides: Sides, prepared: PreparedRouter, rows: np.ndarray) -> float | None:
    """Rms difference of the inputs over their rms, where both sides recorded them."""
    if not sides.has_other_inputs:
        return None
    rows = rows[:_MEASURED]
    mine = [batch.values for batch in sides.batches(prepared, rows)]
    a = np.concatenate([values for values in mine if values is not None])
    found = noise_between(a, sides.other_values(prepared.router, rows))
    size = float(np.sqrt((a.astype(np.float64) ** 2).mean()))
    return np.sqrt(2.0) * found.scale / size if size else None
