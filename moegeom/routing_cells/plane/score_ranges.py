r"""Selection scores over rectangles of a plane: linear in the point, and a bound of the rest.

Over a rectangle with centre c and half sides h, each expert's selection score is enclosed by

.. math:: |q(c + \delta) - v - g \cdot \delta| \le r, \qquad |\delta| \le h,

first-order Taylor models (Makino and Berz 1996). Two experts are compared by the difference of
their linear parts, which for affine logits is the exact range of the difference, so that what
remains undecided around a facet shrinks with the square of the rectangle.

Rounding: r also covers what float64 makes of q, once for v and once for the router's own
evaluation at any point, so that a choice that the enclosures prove is that of the exact rule and of
its evaluation in float64. Assumed: exp, log1p and tanh of NumPy within 4 ulp (measured: 1), the
other operations correctly rounded. Bounds are sums of at most four thousand positive terms, whose
own rounding is within the share ``SPARE``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moegeom.core.router import Projection, Rule
from moegeom.core.shapes import Float, Float64, Int32
from moegeom.geometry.boundary.curved import BENDS
from moegeom.geometry.rows import LEAST_LENGTH
from moegeom.geometry.selection import group_mask, selection_scores, top_k

UNIT = 2.0**-53
#: Relative rounding of a bound that is summed up in float64, and of a gradient.
SPARE = 2.0**-40
#: What may be lost below the normal numbers, where exp and log1p underflow.
FLOOR = 1e-150


@dataclass(frozen=True, eq=False)
class Rectangles:
    """Centres, and half sides that reach at least to the true edges."""

    centre: Float64[np.ndarray, "rectangles 2"]
    half: Float64[np.ndarray, "rectangles 2"]


@dataclass(frozen=True, eq=False)
class Enclosure:
    """Value at the centre, gradient, and bound of the rest, of every quantity over rectangles.

    ``reach`` bounds the change of the linear part, |g| h.
    """

    value: Float64[np.ndarray, "rectangles experts"]
    along_x: Float64[np.ndarray, "rectangles experts"]
    along_y: Float64[np.ndarray, "rectangles experts"]
    rest: Float64[np.ndarray, "rectangles experts"]
    half: Float64[np.ndarray, "rectangles 2"]

    @cached_property
    def reach(self) -> np.ndarray:
        change = np.abs(self.along_x)
        change *= self.half[:, :1]
        upwards = np.abs(self.along_y)
        upwards *= self.half[:, 1:]
        change += upwards
        return change

    @cached_property
    def width(self) -> np.ndarray:
        """Bound of the distance from the value at the centre."""
        width = self.reach + self.rest
        width *= 1.0 + SPARE
        return width

    @cached_property
    def low(self) -> np.ndarray:
        return self.value - self.width

    @cached_property
    def high(self) -> np.ndarray:
        return self.value + self.width


def product(left: Enclosure, right: Enclosure) -> Enclosure:
    """The product of two enclosed quantities."""
    wide_left, wide_right = left.width, right.width
    value = left.value * right.value
    rest = np.abs(left.value) * right.rest + np.abs(right.value) * left.rest
    rest = rest + wide_left * wide_right + 16.0 * UNIT * np.abs(value)
    return Enclosure(
        value,
        left.along_x * right.value + left.value * right.along_x,
        left.along_y * right.value + left.value * right.along_y,
        # the two parts of a gradient may cancel, their rounding does not
        rest + SPARE * (np.abs(right.value) * wide_left + np.abs(left.value) * wide_right),
        left.half,
    )


def composed(
    inner: Enclosure,
    value: Float64[np.ndarray, "rectangles experts"],
    slope: Float64[np.ndarray, "rectangles experts"],
    bend: Callable[[np.ndarray], np.ndarray],
    rounding: Float64[np.ndarray, "rectangles experts"],
) -> Enclosure:
    """A function of an enclosed quantity: its value and slope at the centre.

    ``bend`` bounds its second derivative within a width, ``rounding`` the error of its value.
    """
    width = inner.width
    rest = slope * inner.rest + 0.5 * bend(width) * width * width + rounding
    rest = rest + SPARE * slope * width + FLOOR * (1.0 + width) ** 2
    return Enclosure(value, slope * inner.along_x, slope * inner.along_y, rest, inner.half)


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


#: Largest |t''| of t = tanh: 4 / 27^(1/2).
_TANH_BEND = 0.7698003590
#: Rounding of a score relative to itself, for the two evaluations: 12 units each at most.
_SCORE_UNITS = 32.0 * UNIT


def score_ranges(router: PlaneRouter, rectangles: Rectangles) -> Enclosure:
    """Enclosures of the selection scores of all experts, before any group mask.

    What is compared is that of :func:`~moegeom.geometry.selection.selection_scores`: logits
    for an affine rule, ``score(mapped logit) + bias`` for others. Cosine logits without a bias that
    follows are compared before they are divided by the length of the projected input, which is one
    positive factor. Values that overflow make the rest inf or nan, which proves nothing.

    Oracle in tests: the selection scores at random points, and mpmath at some.
    """
    rule, bias = router.rule, router.selection_bias
    with np.errstate(over="ignore", invalid="ignore"):
        scores = affine_ranges(router, rectangles)
        if router.length is not None and not (rule.is_affine and bias is None):
            scores = times_factor(scores, router.length, rectangles)
        if not rule.is_affine:
            if rule.logit_map is not None:
                scores = mapped(scores, rule.logit_map.multiplier, rule.logit_map.soft_cap)
            if rule.score == "softmax":
                scores = softmax_ranges(scores)
            elif rule.score != "identity":
                scores = curved(scores, rule.score)
        return _rounded(scores, bias)


def affine_ranges(router: PlaneRouter, rectangles: Rectangles) -> Enclosure:
    """Logits: only rounding is left beside the linear part."""
    farthest = (np.abs(rectangles.centre) + rectangles.half).max(axis=0)
    size = np.abs(router.slope) @ farthest + np.abs(router.offset)
    shape = len(rectangles.centre), len(router.offset)
    return Enclosure(
        rectangles.centre @ router.slope.T + router.offset,
        np.broadcast_to(router.slope[:, 0], shape),
        np.broadcast_to(router.slope[:, 1], shape),
        np.broadcast_to(16.0 * UNIT * size + FLOOR, shape),
        rectangles.half,
    )


def times_factor(logits: Enclosure, length: PlaneLength, rectangles: Rectangles) -> Enclosure:
    r"""Logits times :math:`\lambda = s / |L|`, with L the projected input.

    :math:`|L|` has slope at most that of L, and bends by at most its square over the least length;
    a length that may fall below 1e-12 is enclosed by its range alone.
    """
    at = rectangles.centre @ length.slope.T + length.offset
    middle = np.linalg.norm(at, axis=1, keepdims=True)
    half = rectangles.half
    step = half @ np.linalg.norm(length.slope, axis=0)[:, None]
    farthest = np.abs(rectangles.centre) + half
    size = np.linalg.norm(np.abs(length.offset) + farthest @ np.abs(length.slope).T, axis=1)
    rounding = (16.0 + 2.0 * at.shape[1]) * UNIT * size[:, None] + FLOOR
    step = (step + rounding) * (1.0 + SPARE)
    least = np.maximum(middle - step, LEAST_LENGTH)
    scale = abs(length.scale)
    is_smooth = middle - step > 2.0 * LEAST_LENGTH
    far = np.maximum(middle, LEAST_LENGTH)
    gradient = np.where(is_smooth, -length.scale * (at @ length.slope) / far**3, 0.0)
    bent = scale * (rounding / least**2 + 1.5 * step**2 / least**3)
    whole = scale * (1.0 / least - 1.0 / np.maximum(middle + step, LEAST_LENGTH))
    factor = Enclosure(
        length.scale / far,
        gradient[:, :1],
        gradient[:, 1:],
        np.where(is_smooth, bent, whole) + 16.0 * UNIT * scale / least,
        half,
    )
    return product(logits, factor)


def mapped(logits: Enclosure, multiplier: float, cap: float) -> Enclosure:
    r"""Logits behind the map :math:`c \tanh(m z / c)`, or m z without a cap."""
    units = 8.0 * UNIT * multiplier * (np.abs(logits.value) + logits.width)
    if np.isinf(cap):
        slope = np.full(logits.value.shape, multiplier)
        return composed(logits, logits.value * multiplier, slope, np.zeros_like, units)
    ratio = np.tanh(logits.value * multiplier / cap)
    scale = multiplier * multiplier / cap

    def bend(width: np.ndarray) -> np.ndarray:
        near = np.abs(ratio) + multiplier * width / cap
        # 1 - ratio^2 has an error of a few units, whatever its size
        lost = 32.0 * UNIT * multiplier / np.maximum(width, FLOOR)
        return scale * np.minimum(_TANH_BEND * (1.0 + SPARE), 2.0 * near) + lost

    slope = multiplier * (1.0 - ratio * ratio)
    return composed(logits, cap * ratio, slope, bend, units + _SCORE_UNITS * cap * np.abs(ratio))


def curved(logits: Enclosure, score: str) -> Enclosure:
    r"""A separable score of its logit, ``sigmoid`` or ``sqrt_softplus``.

    The second derivative is at most ``BENDS.bend``, and at most ``log_slope`` times a slope that
    changes by the factor :math:`e^{L w} \le 1 / (1 - L w)` within the width w. The constants are
    given to eleven digits, and taken larger by a millionth.
    """
    bends = BENDS[score]
    value, slope = _CURVES[score](logits.value)

    def bend(width: np.ndarray) -> np.ndarray:
        lost = np.minimum(bends.log_slope * width, 0.9)
        near = np.minimum(bends.bend, bends.log_slope * slope / (1.0 - lost))
        return np.where(lost < 0.9, near, bends.bend) * (1.0 + 1e-6)

    return composed(logits, value, slope, bend, _SCORE_UNITS * value)


def _sigmoid(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    decay = np.exp(-np.abs(z))
    larger = 1.0 / (1.0 + decay)
    smaller = decay * larger
    return np.where(z >= 0.0, larger, smaller), larger * smaller


def _sqrt_softplus(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    decay = np.exp(-np.abs(z))
    value = np.sqrt(np.maximum(z, 0.0) + np.log1p(decay))
    sigmoid = np.where(z >= 0.0, 1.0, decay) / (1.0 + decay)
    return value, sigmoid / (2.0 * np.maximum(value, FLOOR))


#: Value and slope of a separable score.
_CURVES: dict[str, Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "sigmoid": _sigmoid,
    "sqrt_softplus": _sqrt_softplus,
}


def softmax_ranges(logits: Enclosure) -> Enclosure:
    r"""Softmax of enclosed logits, from the deviations :math:`d_i = (g_i - \bar g) \delta`.

    With :math:`\bar g = \sum p g` at the centre, :math:`\sum p d = 0`, so that the normaliser moves
    by :math:`\bar g \delta + R` with :math:`0 \le R \le \kappa = \sum p w^2 e^w / 2`, w the range
    of d (Jensen, and Taylor); and :math:`p_i(\delta) = p_i e^{d_i - R}`. A probability is never
    farther than 1 from another one, which bounds what is too wide for that.
    """
    shifted = logits.value - logits.value.max(axis=1, keepdims=True)
    powers = np.exp(shifted)
    total = powers.sum(axis=1, keepdims=True)
    value = powers / total
    mean_x = (value * logits.along_x).sum(axis=1, keepdims=True)
    mean_y = (value * logits.along_y).sum(axis=1, keepdims=True)
    away = Enclosure(
        value, logits.along_x - mean_x, logits.along_y - mean_y, logits.rest, logits.half
    )
    width = away.reach * (1.0 + SPARE)
    # rounding of the mean, of the sum and of the logits: all are a common shift of the logs
    units = (4.0 * value.shape[1] + 64.0) * UNIT
    lost = logits.rest.max(axis=1, keepdims=True) * (1.0 + SPARE)
    lost = lost + units * (1.0 + (value * logits.reach).sum(axis=1, keepdims=True))
    grown = _grown(value, shifted - np.log(total), width)
    bent = 0.5 * (grown * width * width).sum(axis=1, keepdims=True) * (1.0 + SPARE) + lost
    whole = width + logits.rest + bent
    rest = logits.rest + bent + lost + 0.5 * whole * whole * _grown(1.0, 0.0, whole)
    rest = (value + 1e-300) * (rest + SPARE * width + units * (1.0 - shifted)) + FLOOR
    along_x, along_y = value * away.along_x, value * away.along_y
    rest = np.where(whole < 600.0, np.fmin(rest, 1.0 + value * width), 1.0 + value * width)
    return Enclosure(value, along_x, along_y, rest, logits.half)


def _grown(value: np.ndarray | float, log: np.ndarray | float, width: np.ndarray) -> np.ndarray:
    """Bound of :math:`p e^w`, by 1 / (1 - w) where all widths are small; p may have underflown."""
    if width.max(initial=0.0) < 0.5:
        return value / (1.0 - width)
    return np.exp(np.minimum(log + width, 700.0))


def _rounded(scores: Enclosure, bias: np.ndarray | None) -> Enclosure:
    """With the bias added, and the rounding of that and of a difference or sum of two scores."""
    value = scores.value if bias is None else scores.value + bias
    size = np.abs(value) if bias is None else np.abs(scores.value) + np.abs(bias)
    rest = (scores.rest + 8.0 * UNIT * size) * (1.0 + SPARE) + SPARE * scores.reach
    return Enclosure(value, scores.along_x, scores.along_y, rest, scores.half)
