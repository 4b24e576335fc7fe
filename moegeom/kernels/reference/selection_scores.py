"""Selection scores of curved rules."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64

from moegeom.geometry.selection.score import SCORES


def selection_scores(
    logits: Float[np.ndarray, "tokens experts"],
    score: str,
    bias: Float64[np.ndarray, "experts"],
) -> Float64[np.ndarray, "tokens experts"]:
    """``score(logit) + bias`` in float64; see :mod:`moegeom.geometry.selection.score`."""
    return SCORES[score](logits) + bias
