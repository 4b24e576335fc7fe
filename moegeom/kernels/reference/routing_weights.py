"""Routing weights of the chosen experts."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.core.router import Rule
from moegeom.geometry.selection import weights
from moegeom.geometry.selection.score import SCORES


def routing_weights(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rule: Rule,
) -> Float64[np.ndarray, "tokens k"]:
    """Weights in the order of ``chosen``; see :mod:`moegeom.geometry.selection.weights`."""
    return weights.routing_weights(logits, SCORES[rule.score](logits), chosen, rule.weights)
