"""A router on a plane: the numbers that a picture of its choices is about."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.core.router import Projection, Rule
from moegeom.geometry.rows.projected_rows import LEAST_LENGTH
from moegeom.geometry.selection.mask import group_mask
from moegeom.geometry.selection.pick import top_k
from moegeom.geometry.selection.route import selection_scores


@dataclass(frozen=True, eq=False)
class PlaneLength:
    """The length ``|slope u + offset|`` that cosine logits are divided by, and their scale."""

    slope: Float64[np.ndarray, "projected 2"]
    offset: Float64[np.ndarray, "projected"]
    scale: float

    def factor(self, points: Float64[np.ndarray, "points 2"]) -> Float64[np.ndarray, "points"]:
        """What turns affine logits into cosine logits: scale / length, at least 1e-12 counts."""
        length = np.linalg.norm(points @ self.slope.T + self.offset, axis=1)
        return self.scale / np.maximum(length, LEAST_LENGTH)


@dataclass(frozen=True, eq=False)
class PlaneRouter:
    """A rule and the affine logits ``slope u + offset`` of the points u of a plane.

    With ``length`` they are divided by that of the projected input.
    """

    rule: Rule
    slope: Float64[np.ndarray, "experts 2"]
    offset: Float64[np.ndarray, "experts"]
    selection_bias: Float64[np.ndarray, "experts"] | None = None
    length: PlaneLength | None = None

    def logits(
        self, points: Float64[np.ndarray, "points 2"]
    ) -> Float64[np.ndarray, "points experts"]:
        """What the rule is applied to, in float64."""
        affine = points @ self.slope.T + self.offset
        return affine if self.length is None else affine * self.length.factor(points)[:, None]

    def choice(self, points: Float64[np.ndarray, "points 2"]) -> Int32[np.ndarray, "points k"]:
        """The chosen experts of each point in ascending order, by the rule in float64."""
        scores = selection_scores(self.logits(points), self.rule, self.selection_bias)
        if self.rule.groups is not None:
            scores = group_mask(scores, self.rule.groups)
        return np.sort(top_k(scores, self.rule.top_k), axis=1)


def plane_router(
    rule: Rule,
    weight: Float[np.ndarray, "experts hidden"],
    logit_bias: Float[np.ndarray, "experts"] | None,
    selection_bias: Float[np.ndarray, "experts"] | None,
    centre: Float[np.ndarray, "hidden"],
    basis: Float[np.ndarray, "hidden 2"],
    projection: Projection | None = None,
) -> PlaneRouter:
    r"""The router on the plane :math:`y = c + B u`: logits :math:`(W B) u + (W c + b)`.

    Products are rounded to float64 once; everything said about the plane is said about the rounded
    numbers. ``weight`` and ``logit_bias`` are those of a ``Router``, composed with its projection.

    Raises ValueError where a product is not finite, or the rule does not fit the experts.
    """
    directions, middle = basis.astype(np.float64), centre.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        slope = weight.astype(np.float64) @ directions
        offset = weight.astype(np.float64) @ middle
        if logit_bias is not None:
            offset = offset + logit_bias.astype(np.float64)
        bias = None if selection_bias is None else selection_bias.astype(np.float64)
        length = _length(projection, directions, middle)
    numbers = [slope, offset, bias, *((length.slope, length.offset) if length else ())]
    if not all(np.isfinite(array).all() for array in numbers if array is not None):
        raise ValueError("logits on the plane are not finite")
    experts, groups = len(slope), rule.groups
    if not 1 <= rule.top_k <= experts:
        raise ValueError(f"top_k {rule.top_k} of {experts} experts")
    if groups is not None and experts % groups.num_groups:
        raise ValueError(f"{experts} experts in {groups.num_groups} equal groups")
    return PlaneRouter(rule, slope, offset, bias, length)


def _length(
    projection: Projection | None, directions: np.ndarray, middle: np.ndarray
) -> PlaneLength | None:
    if projection is None or projection.scale is None:
        return None
    if not projection.scale > 0.0:
        raise ValueError(f"scale {projection.scale} of cosine logits: it is positive")
    matrix = projection.weight.astype(np.float64)
    offset = matrix @ middle
    if projection.bias is not None:
        offset = offset + projection.bias.astype(np.float64)
    return PlaneLength(matrix @ directions, offset, projection.scale)
