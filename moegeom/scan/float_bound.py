"""How far two correct float32 engines can put the selection scores of a token apart."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.geometry.rounding import UNIT_FLOAT32, logit_error_bound, score_resolution
from moegeom.geometry.selection.logit_map import mapped_logits
from moegeom.geometry.selection.score import LARGEST_SLOPE, SCORES
from moegeom.scan.prepared import PreparedRouter


def float_bound(
    prepared: PreparedRouter,
    norm: Float64[np.ndarray, "tokens"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    margin: Float64[np.ndarray, "tokens"],
    scale: Float64[np.ndarray, "tokens"] | None,
) -> Float64[np.ndarray, "tokens"]:
    """Margin below which two correct float32 engines may choose differently."""
    rule = prepared.router.rule
    bound = logit_error_bound(norm, prepared.num_terms, prepared.longest_row, prepared.largest_bias)
    if scale is not None:
        bound = bound * scale
    if rule.is_affine:
        first, last = (
            np.take_along_axis(logits, chosen[:, [rank]], axis=1)[:, 0].astype(np.float64)
            for rank in (0, -1)
        )
        return 2.0 * bound + score_resolution(rule.score, first, last, last - margin)
    # A score and its bias are rounded a few times each, relative to their size.
    largest_logit = mapped_logits(logits.max(axis=1, keepdims=True), rule.logit_map)
    size = SCORES[rule.score](largest_logit)[:, 0] + 1.0
    own_rounding = 8 * UNIT_FLOAT32 * (size + float(np.abs(prepared.selection_bias).max()))
    slope = LARGEST_SLOPE[rule.score] * (rule.logit_map.multiplier if rule.logit_map else 1.0)
    return 2.0 * slope * bound + own_rounding
