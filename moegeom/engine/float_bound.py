"""How far two correct float32 engines can put the selection scores of a token apart."""

from __future__ import annotations

import numpy as np

from moegeom.core.router import LogitMap
from moegeom.core.shapes import Float, Float64, Int32
from moegeom.engine.prepared import PreparedRouter
from moegeom.geometry.number_formats import map_gap
from moegeom.geometry.rounding import UNIT_FLOAT32, logit_error_bound, score_resolution
from moegeom.geometry.selection import LARGEST_SLOPE, SCORES, mapped_logits


def float_bound(
    prepared: PreparedRouter,
    norm: Float64[np.ndarray, "tokens"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    margin: Float64[np.ndarray, "tokens"],
    scale: Float64[np.ndarray, "tokens"] | None,
) -> Float64[np.ndarray, "tokens"]:
    """Margin below which two correct float32 engines may choose differently."""
    rule, logit_map = prepared.router.rule, prepared.router.rule.logit_map
    bound = logit_error_bound(norm, prepared.num_terms, prepared.longest_row, prepared.largest_bias)
    if scale is not None:
        bound = bound * scale
    if rule.is_affine:
        token = np.arange(len(logits))
        first, last = (logits[token, chosen[:, rank]].astype(np.float64) for rank in (0, -1))
        if logit_map is not None:
            return _behind_map(rule.score, logit_map, bound, first, last, margin)
        return 2.0 * bound + score_resolution(rule.score, first, last, last - margin)
    # A score and its bias are rounded a few times each, relative to their size.
    if rule.score == "identity":  # the size of a logit, whatever its sign
        size = prepared.longest_row * norm + prepared.largest_bias
    else:
        largest_logit = mapped_logits(logits.max(axis=1, keepdims=True), logit_map)
        size = SCORES[rule.score](largest_logit)[:, 0]
    slope = LARGEST_SLOPE[rule.score]
    own_rounding = 8 * UNIT_FLOAT32 * (size + 1.0 + float(np.abs(prepared.selection_bias).max()))
    if logit_map is not None:
        farthest = np.abs(logits).max(axis=1).astype(np.float64)
        ends = mapped_logits(farthest, logit_map)
        own_rounding += slope * map_gap(ends, ends, logit_map, "float32")
        slope *= logit_map.multiplier
    return 2.0 * slope * bound + own_rounding


def _behind_map(
    score: str,
    logit_map: LogitMap,
    bound: Float64[np.ndarray, "tokens"],
    first: Float64[np.ndarray, "tokens"],
    last: Float64[np.ndarray, "tokens"],
    margin: Float64[np.ndarray, "tokens"],
) -> Float64[np.ndarray, "tokens"]:
    """The margin of logits whose image is as wide as engines need it; inf where a cap leaves none.

    In proportion: a margin is below it exactly where its image is below what is needed.
    """
    following = last - margin
    largest, one, other = (mapped_logits(z, logit_map) for z in (first, last, following))
    needed = 2.0 * logit_map.multiplier * bound + map_gap(one, other, logit_map, "float32")
    needed += score_resolution(score, largest, one, other)
    image = one - other
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(image > 0.0, margin * (needed / image), np.inf)
    return np.where(np.isneginf(following), 2.0 * bound, found)
