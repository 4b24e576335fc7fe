"""A router on a plane, the frame of a picture of its choices, and what is said of its pixels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from moegeom.core.router import Projection, Rule
from moegeom.core.shapes import Float, Float64, Int32, Int64, UInt8
from moegeom.geometry.rows import LEAST_LENGTH
from moegeom.geometry.selection import group_mask, selection_scores, top_k
from moegeom.routing_cells.plane.raster_enclosure import Rectangles


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


#: Corners and halves in units of pixels are off by this share of the largest coordinate.
_EDGE = 2.0**-49
#: Larger pictures are refused.
MOST_PIXELS = 1 << 26


class PixelState(IntEnum):
    """What is proved of a closed pixel.

    ``CONSTANT``: one set on all of it. ``CROSSED``: two points of it whose sets differ, both
    proved. ``OPEN``: neither, down to the last subdivision.
    """

    CONSTANT = 0
    CROSSED = 1
    OPEN = 2


@dataclass(frozen=True)
class Frame:
    """The part of the plane that is shown, and its pixels; row 0 of a picture is at ``y0``."""

    x0: float
    x1: float
    y0: float
    y1: float
    width: int
    height: int

    @property
    def padding(self) -> Float64[np.ndarray, "2"]:
        """How far a computed edge may be from the true one."""
        return _EDGE * np.array([abs(self.x0) + abs(self.x1), abs(self.y0) + abs(self.y1)])

    def rectangles(self, bounds: Int64[np.ndarray, "n 4"], parts: int) -> Rectangles:
        """(left, right, bottom, top) in parts of a pixel to rectangles that cover the true ones."""
        start = np.array([self.x0, self.y0])
        side = np.array([self.x1 - self.x0, self.y1 - self.y0])
        share = side / (np.array([self.width, self.height], dtype=np.float64) * parts)
        low, high = start + bounds[:, 0::2] * share, start + bounds[:, 1::2] * share
        return Rectangles(0.5 * (low + high), 0.5 * (high - low) + self.padding)


@dataclass(frozen=True, eq=False)
class Raster:
    """Choices on a frame: row r is the r-th from ``y0``, column c the c-th from ``x0``.

    ``label`` is an index into ``expert_sets``: for a constant pixel the set that is proved, for
    others what the rule chooses at its centre in float64 (ties: the lower index). ``state`` is that
    of :class:`PixelState`. ``expert_sets`` has in ascending order what labels need, and what was
    proved at some point of the frame.
    """

    label: Int32[np.ndarray, "height width"]
    state: UInt8[np.ndarray, "height width"]
    expert_sets: tuple[tuple[int, ...], ...]

    def count(self, state: PixelState) -> int:
        """Number of pixels of a state."""
        return int(np.count_nonzero(self.state == state))

    def share(self, state: PixelState) -> float:
        """Share of the area of the frame."""
        return self.count(state) / self.state.size


def check_frame(frame: Frame, depth: int) -> None:
    """Raises ValueError for a frame that is empty, too large, or too fine for float64."""
    sides = np.array([frame.x1 - frame.x0, frame.y1 - frame.y0])
    pixels = np.array([frame.width, frame.height])
    if not np.isfinite(sides).all() or sides.min() <= 0.0 or pixels.min() < 1:
        raise ValueError(f"empty frame {frame}")
    if frame.width * frame.height > MOST_PIXELS:
        raise ValueError(f"{frame.width} x {frame.height} pixels, at most {MOST_PIXELS}")
    # a sample is inside its pixel by more than what rounding moves it
    if not 0 <= depth <= 12 or np.any(sides / pixels < frame.padding * 2.0 ** (10 + depth)):
        raise ValueError(f"pixels of {frame} in {depth} halvings are too small for float64")
