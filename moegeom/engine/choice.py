"""Logits of a router, what it chooses by them, and how far rounding may put them apart."""

from __future__ import annotations

import numpy as np

from moegeom.core.router import LogitMap, Rule
from moegeom.core.shapes import Float, Float64, Int32
from moegeom.core.tokens import TILE
from moegeom.engine.prepared import PreparedRouter
from moegeom.geometry.number_formats import map_gap
from moegeom.geometry.rounding import UNIT_FLOAT32, logit_error_bound, score_resolution
from moegeom.geometry.selection import LARGEST_SLOPE, SCORES, mapped_logits
from moegeom.kernels.reduction import Kernels


def tile_logits(
    values: Float[np.ndarray, "tokens hidden"],
    weight_columns: Float[np.ndarray, "hidden experts"],
    bias: Float[np.ndarray, "experts"] | None,
) -> Float[np.ndarray, "tokens experts"]:
    """Logits W y + b of tokens that begin on a tile border.

    One product per tile, the last one filled with zeros: each token meets the same
    product, of the same shape and at the same row, whatever batch it came in. The dtype is that of
    the weights (float32, or float64 where they are stored so), and so is the accumulation.
    """
    tokens = len(values)
    logits = np.empty((-(-tokens // TILE) * TILE, weight_columns.shape[1]), weight_columns.dtype)
    for start in range(0, tokens, TILE):
        tile = values[start : start + TILE]
        if len(tile) < TILE or tile.dtype != logits.dtype:
            padded = np.zeros((TILE, values.shape[1]), dtype=logits.dtype)
            padded[: len(tile)] = tile
            tile = padded
        np.matmul(tile, weight_columns, out=logits[start : start + TILE])
    if bias is not None:
        logits += bias
    return logits[:tokens]


def logits_of(
    prepared: PreparedRouter, values: Float[np.ndarray, "tokens hidden"] | None
) -> Float[np.ndarray, "tokens experts"] | None:
    """``W y + b`` of tokens that begin on a tile border; None where no inputs were recorded."""
    if values is None:
        return None
    with np.errstate(invalid="ignore", over="ignore"):  # non-finite tokens are counted apart
        return tile_logits(values, prepared.weight_columns, prepared.logit_bias)


def compared_scores(
    prepared: PreparedRouter,
    logits: Float[np.ndarray, "tokens experts"],
    scored: Float[np.ndarray, "tokens experts"],
    kernels: Kernels,
) -> tuple[Float[np.ndarray, "tokens experts"], Float64[np.ndarray, "tokens"] | None]:
    """What top-k looks at, masked groups at their fill, and the group margin (None without groups).

    ``logits`` are ``W y + b``; ``scored`` are those that scores are made of.
    """
    rule, compared = prepared.router.rule, logits
    if not rule.is_affine:
        compared = kernels["selection_scores"](
            mapped_logits(scored, rule.logit_map), rule.score, prepared.selection_bias
        )
    return group_masked(rule, compared, kernels)


def group_masked(
    rule: Rule, compared: Float[np.ndarray, "tokens experts"], kernels: Kernels
) -> tuple[Float[np.ndarray, "tokens experts"], Float64[np.ndarray, "tokens"] | None]:
    """Selection scores with masked groups at their fill, and the group margin; None without."""
    return (compared, None) if rule.groups is None else kernels["group_mask"](compared, rule.groups)


def chosen_by(
    prepared: PreparedRouter, logits: Float[np.ndarray, "tokens experts"], kernels: Kernels
) -> Int32[np.ndarray, "tokens k"]:
    """The chosen experts of a router that is not behind a projection, best first."""
    compared, _ = compared_scores(prepared, logits, logits, kernels)
    chosen, _ = kernels["top_k"](compared, prepared.router.rule.top_k)
    return chosen


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
        needed_margin = np.where(image > 0.0, margin * (needed / image), np.inf)
    return np.where(np.isneginf(following), 2.0 * bound, needed_margin)
