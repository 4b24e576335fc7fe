"""The whole rule, step after step: the reference that every faster kernel is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.core.router import Rule
from moegeom.geometry.selection.logit_map import mapped_logits
from moegeom.geometry.selection.mask import group_margin, group_mask
from moegeom.geometry.selection.pick import margin, top_k
from moegeom.geometry.selection.score import SCORES
from moegeom.geometry.selection.weights import routing_weights


@dataclass(frozen=True, eq=False)
class Routing:
    """What a rule makes of the logits of some tokens.

    ``margin`` is in units of the selection score, which is the logit for an affine rule;
    ``group_margin`` is inf without group mask.
    """

    chosen: Int32[np.ndarray, "tokens k"]
    weights: Float64[np.ndarray, "tokens k"]
    margin: Float64[np.ndarray, "tokens"]
    group_margin: Float64[np.ndarray, "tokens"]


def selection_scores(
    logits: Float[np.ndarray, "tokens experts"],
    rule: Rule,
    selection_bias: Float[np.ndarray, "experts"] | None = None,
) -> Float64[np.ndarray, "tokens experts"]:
    """What the experts are compared by, before any group mask.

    An affine rule compares logits (plus a bias on raw logits): the score is increasing, so it
    changes no comparison, and rounding inside it could. Every other rule compares
    ``score(logit) + selection_bias``.
    """
    if rule.is_affine:
        compared = logits.astype(np.float64)
    else:
        compared = SCORES[rule.score](mapped_logits(logits, rule.logit_map))
    return compared if selection_bias is None else compared + selection_bias.astype(np.float64)


def route(
    logits: Float[np.ndarray, "tokens experts"],
    rule: Rule,
    selection_bias: Float[np.ndarray, "experts"] | None = None,
    shared_sum: Float64[np.ndarray, "tokens"] | None = None,
) -> Routing:
    """Chosen experts, routing weights and margins from logits (logit bias already added).

    ``shared_sum`` is that of :func:`~moegeom.geometry.selection.weights.routing_weights`.
    Float64 throughout; docs/theory.md A1, E1, E2. Oracle in tests: the routers of transformers.
    """
    selection = selection_scores(logits, rule, selection_bias)
    groups = rule.groups
    masked = selection if groups is None else group_mask(selection, groups)
    chosen = top_k(masked, rule.top_k)
    unlimited = np.full(logits.shape[0], np.inf)
    mapped = mapped_logits(logits, rule.logit_map)
    scores = SCORES[rule.score](mapped)
    return Routing(
        chosen=chosen,
        weights=routing_weights(mapped, scores, chosen, rule.weights, shared_sum),
        margin=margin(masked, rule.top_k),
        group_margin=unlimited if groups is None else group_margin(selection, groups),
    )
