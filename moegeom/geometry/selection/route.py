"""The whole rule, step after step: the reference that every faster kernel is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.core.router import Rule
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
    compared = logits.astype(np.float64) if rule.is_affine else SCORES[rule.score](logits)
    return compared if selection_bias is None else compared + selection_bias.astype(np.float64)


def route(
    logits: Float[np.ndarray, "tokens experts"],
    rule: Rule,
    selection_bias: Float[np.ndarray, "experts"] | None = None,
) -> Routing:
    """Chosen experts, routing weights and margins from logits (logit bias already added).

    Float64 throughout; THEORY.md A1, E1, E2. Oracle in tests: the routers of transformers.
    """
    selection = selection_scores(logits, rule, selection_bias)
    groups = rule.groups
    masked = selection if groups is None else group_mask(selection, groups)
    chosen = top_k(masked, rule.top_k)
    unlimited = np.full(logits.shape[0], np.inf)
    return Routing(
        chosen=chosen,
        weights=routing_weights(logits, SCORES[rule.score](logits), chosen, rule.weights),
        margin=margin(masked, rule.top_k),
        group_margin=unlimited if groups is None else group_margin(selection, groups),
    )
