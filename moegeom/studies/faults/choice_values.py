"""Logits or routing weights recorded by run B, and their distance to a candidate router's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Float, Float64, Int32, Int64
from moegeom.geometry.contrasts import contrasts
from moegeom.geometry.selection import SCORES, mapped_logits, routing_weights, selection_scores


@dataclass(frozen=True, eq=False)
class ChoiceValues:
    """Logits of all experts, or logarithms of the weights of those that B chose, in its order."""

    values: Float64[np.ndarray, "tokens values"]
    is_logits: bool

    @staticmethod
    def of_weights(weights: Float64[np.ndarray, "tokens k"]) -> ChoiceValues:
        """Logarithms of the weights; nan for tokens with a weight that is not positive."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return ChoiceValues(np.where(weights > 0.0, np.log(weights), np.nan), False)

    def apart(
        self,
        router: Router,
        rows: np.ndarray,
        logits: Float[np.ndarray, "rows experts"],
        chosen: Int32[np.ndarray, "rows k"],
    ) -> Float64[np.ndarray, "rows values"]:
        """Contrasts with a router of these logits; nan where either side is unknown."""
        if self.is_logits:
            return contrasts(self.values[rows], logits)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            predicted = np.log(weights_of(router, logits, chosen))
        return contrasts(self.values[rows], predicted)

    def experts(
        self, chosen: Int32[np.ndarray, "rows k"], number: int
    ) -> Int64[np.ndarray, "rows values"]:
        """The expert of each recorded value."""
        if self.is_logits:
            return np.broadcast_to(np.arange(number), (len(chosen), number))
        return chosen.astype(np.int64)

    def of_each(
        self, router: Router, logits: Float[np.ndarray, "rows experts"]
    ) -> Float[np.ndarray, "rows experts"]:
        """The values a router would record for each expert, up to a constant per token."""
        if self.is_logits:
            return logits
        weights, mapped = router.rule.weights, mapped_logits(logits, router.rule.logit_map)
        is_sigmoid = weights.source == "sigmoid_of_selected_logits"
        if weights.source == "scores":
            is_sigmoid = router.rule.score == "sigmoid"
        return -np.logaddexp(0.0, -mapped) if is_sigmoid else mapped


def weights_of(
    router: Router,
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    leaks: bool = False,
) -> Float64[np.ndarray, "tokens k"]:
    """Weights of the chosen experts; with the selection bias in their scores if it leaks."""
    rule = router.rule
    mapped = mapped_logits(logits, rule.logit_map)
    scores = SCORES[rule.score](mapped)
    if leaks:
        scores = selection_scores(logits, rule, router.selection_bias)
    weights = routing_weights(mapped, scores, chosen, rule.weights)
    return weights if router.expert_scale is None else weights * router.expert_scale[chosen]
