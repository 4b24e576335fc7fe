"""What a router chooses, from its logits."""

from __future__ import annotations

import numpy as np

from moegeom.core.router import Rule
from moegeom.core.shapes import Float, Float64, Int32
from moegeom.engine.prepared import PreparedRouter
from moegeom.engine.products import tile_logits
from moegeom.geometry.selection import mapped_logits
from moegeom.kernels.reduction import Kernels


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
