"""One router of an explanation: each hypothesis tried on the inputs at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float64

from moegeom.core.router import Router
from moegeom.engine.prepared import PreparedRouter
from moegeom.geometry.rows.expert_matching import overlap_beyond_chance
from moegeom.geometry.selection.admitted_sets import TIES
from moegeom.studies.explain.noise import Nearest, flip_noise
from moegeom.studies.explain.record import FlipNoise, LayerEvidence, Tried
from moegeom.studies.explain.sides import Sides
from moegeom.studies.explain.trials import Choices, Trial, inputs, trials
from moegeom.studies.explain.weights import weight_rule


def layer_evidence(
    choices: Choices,
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
        nearest = Nearest.of(prepared, len(rows))
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
    choices: Choices, sides: Sides, against: Router | None, name: str, is_first: bool
) -> FlipNoise | None:
    """Noise that makes what a hypothesis leaves over; None where it does not apply."""
    trial = next((t for t in trials(choices, sides, against) if t.name == name), None)
    if trial is None:
        return None
    rows, prepared = sides.routed(is_first), trial.prepared(sides)
    nearest, agrees = Nearest.of(prepared, len(rows)), np.zeros(len(rows), dtype=bool)
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
