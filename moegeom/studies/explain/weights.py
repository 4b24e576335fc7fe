"""Routing weights of the other side, where both sides chose the same experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Bool, Float, Float64, Int32

from moegeom.core.router import Router
from moegeom.engine.prepared import PreparedRouter
from moegeom.geometry.selection.logit_map import mapped_logits
from moegeom.geometry.selection.route import selection_scores
from moegeom.geometry.selection.score import SCORES
from moegeom.geometry.selection.weights import routing_weights
from moegeom.studies.explain.record import WeightRule
from moegeom.studies.explain.sides import Sides
from moegeom.tokens.stages import VALUE_STAGES

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
