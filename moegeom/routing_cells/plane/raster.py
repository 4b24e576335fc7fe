r"""A picture of the choices on a plane, in which every pixel carries its proof or says it has none.

Rectangles are halved, all undecided ones of a level at once, until one set is proved for each; at
the size of a pixel points with different choices prove the opposite. Over a rectangle with centre c
and half sides h, each expert's selection score is enclosed by

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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import combinations

import numpy as np

from moegeom.core.router import GroupMask, Projection, Router, Rule
from moegeom.core.shapes import Bool, Float64, Int32, Int64, UInt8
from moegeom.geometry import selection
from moegeom.geometry.boundary.curved import BENDS
from moegeom.geometry.rows import LEAST_LENGTH
from moegeom.routing_cells.plane.subspace import Slice

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

    def each(
        self,
        part: Callable[[np.ndarray], np.ndarray],
        half: Float64[np.ndarray, "_ 2"] | None = None,
    ) -> Enclosure:
        """The same of a linear part of the quantities; ``half`` is that of other rectangles."""
        arrays = (self.value, self.along_x, self.along_y, self.rest)
        value, along_x, along_y, rest = map(part, arrays)
        return Enclosure(value, along_x, along_y, rest, self.half if half is None else half)

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
        scores = selection.selection_scores(self.logits(points), self.rule, self.selection_bias)
        if self.rule.groups is not None:
            scores = selection.group_mask(scores, self.rule.groups)
        return np.sort(selection.top_k(scores, self.rule.top_k), axis=1)


def plane_router(router: Router, part: Slice) -> PlaneRouter:
    r"""The router on the plane :math:`y = c + B u`: logits :math:`(W B) u + (W c + b)`.

    Products are rounded to float64 once; everything said about the plane is said about the rounded
    numbers. Rows of a router are composed with its projection.

    Raises ValueError where a product is not finite, or the rule does not fit the experts.
    """
    rule, bias = router.rule, router.selection_bias
    with np.errstate(invalid="ignore", over="ignore"):
        slope, offset = part.instance(router.weight, router.logit_bias)
        bias = None if bias is None else bias.astype(np.float64)
        length = _length(router.projection, part.basis, part.centre)
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
        return compared_ranges(scores, rule, bias)


def compared_ranges(
    logits: Enclosure, rule: Rule, bias: Float64[np.ndarray, "experts"] | None
) -> Enclosure:
    """Enclosures of the selection scores of enclosed logits, as :func:`score_ranges` has them."""
    with np.errstate(over="ignore", invalid="ignore"):
        scores = logits
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


# ------------------------------------------------------------------------------------ pictures
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


#: Rivals outside the chosen set that are compared with it one by one.
MOST_RIVALS = 16
#: Experts of a group whose pairs are compared one by one.
MOST_LEADERS = 4


@dataclass(frozen=True, eq=False)
class MaskedGroups:
    """Which groups a mask keeps: ``at_centre``, ``always`` and ``perhaps``.

    The latter two hold for every point of a rectangle.
    """

    at_centre: Bool[np.ndarray, "rectangles groups"]
    always: Bool[np.ndarray, "rectangles groups"]
    perhaps: Bool[np.ndarray, "rectangles groups"]


def certain_choice(
    scores: Enclosure, rule: Rule
) -> tuple[Bool[np.ndarray, "rectangles"], Int64[np.ndarray, "rectangles k"]]:
    r"""Whether one set is chosen at every point of each rectangle, and the set at the centre.

    The set S of the centre, in ascending order, is the choice everywhere where each of its experts
    is certainly ahead of each other one that a mask may let through. Without groups that is
    :math:`q_i > q_j` for all i in S and j outside. With groups the experts of S belong to groups
    that are certainly kept, are ahead of the rivals in groups that are possibly kept, and of the
    fill of the mask if it stands for an expert outside S. Masked experts within S (a fill that
    beats kept scores, or fewer kept experts than slots) are those of lowest index: they are all
    equal, so that the kept groups alone decide who they are. Where two groups compete for one
    place, S is also proved by either of them choosing it.

    A tie of two scores is never certain. Source: docs/theory.md E2. Oracle in tests:
    :func:`~moegeom.geometry.selection.route` at random points.
    """
    groups = rule.groups
    with np.errstate(over="ignore", invalid="ignore"):
        if groups is None:
            one = np.ones((len(scores.value), 1), dtype=bool)
            return _certain(scores, MaskedGroups(one, one, one), rule.top_k, -np.inf)
        masks = _kept_groups(scores, groups)
        proved, chosen = _certain(scores, masks, rule.top_k, groups.fill)
        is_duel = (masks.always != masks.perhaps).sum(axis=1) == 2
        is_duel &= masks.always.sum(axis=1) == groups.num_kept - 1
        left = np.flatnonzero(is_duel & ~proved)
        if len(left):
            always, perhaps = masks.always[left], masks.perhaps[left]
            proved[left] = True
            for side in (_first, _last):
                mask = always | side(always != perhaps)
                is_one, same = _certain(
                    _rows(scores, left), MaskedGroups(mask, mask, mask), rule.top_k, groups.fill
                )
                proved[left] &= is_one & (same == chosen[left]).all(axis=1)
        return proved, chosen


def _first(marks: np.ndarray) -> np.ndarray:
    """The first mark of each row alone."""
    return marks & (np.cumsum(marks, axis=1) == 1)


def _last(marks: np.ndarray) -> np.ndarray:
    return _first(marks[:, ::-1])[:, ::-1]


def _certain(
    scores: Enclosure, groups: MaskedGroups, k: int, fill: float
) -> tuple[np.ndarray, np.ndarray]:
    size = scores.value.shape[1] // groups.always.shape[1]
    at_centre, is_always, is_possible = (
        np.repeat(is_unmasked, size, axis=1)
        for is_unmasked in (groups.at_centre, groups.always, groups.perhaps)
    )
    masked = np.where(at_centre, scores.value, fill)
    chosen = np.sort(_largest(masked, k, fill), axis=1)
    is_unmasked, always, perhaps = (
        np.take_along_axis(mask, chosen, axis=1) for mask in (at_centre, is_always, is_possible)
    )
    # of S, an expert is in a kept group for certain, or in a masked one
    is_settled = np.all(np.where(is_unmasked, always, ~perhaps), axis=1)
    is_settled &= np.all(is_unmasked, axis=1) | np.all(groups.always == groups.perhaps, axis=1)
    low = np.where(is_unmasked, np.take_along_axis(scores.low, chosen, axis=1), fill)
    others = ~is_always
    np.put_along_axis(others, chosen, False, axis=1)
    beats_fill = np.all(~is_unmasked | (low > fill), axis=1) | ~others.any(axis=1)
    rivals = np.where(is_possible, scores.high, -np.inf)
    np.put_along_axis(rivals, chosen, -np.inf, axis=1)
    is_likely = is_settled & beats_fill & ~np.isnan(rivals).any(axis=1)
    lowest = low.min(axis=1)
    proved = is_likely & ((lowest > rivals.max(axis=1)) | np.isneginf(rivals).all(axis=1))
    left = np.flatnonzero(is_likely & ~proved)
    if len(left):
        proved[left] = _ahead_of_all(
            _rows(scores, left), rivals[left], chosen[left], is_unmasked[left], fill
        )
    return proved, chosen


def _largest(values: np.ndarray, k: int, fill: float) -> np.ndarray:
    """Indices of the k largest; of those at the fill, which are equal for certain, the lowest."""
    chosen = np.argpartition(-values, k - 1, axis=1)[:, :k]
    smallest = np.take_along_axis(values, chosen, axis=1).min(axis=1)
    ties = np.flatnonzero(smallest == fill)
    if len(ties):
        chosen[ties] = np.argsort(-values[ties], axis=1, kind="stable")[:, :k]
    return chosen


def _ahead_of_all(
    scores: Enclosure, rivals: np.ndarray, chosen: np.ndarray, is_unmasked: np.ndarray, fill: float
) -> np.ndarray:
    """Every expert of the set ahead of every rival, the nearest rivals pair by pair."""
    count = min(MOST_RIVALS, rivals.shape[1])
    nearest = np.argpartition(-rivals, count - 1, axis=1)[:, :count]
    near_high = np.take_along_axis(rivals, nearest, axis=1)
    np.put_along_axis(rivals, nearest, -np.inf, axis=1)
    members, others = _taken(scores, chosen), _taken(scores, nearest)
    low = np.where(is_unmasked, members.low, fill)
    is_ahead = low[:, :, None] > near_high[:, None, :]
    is_ahead |= is_unmasked[:, :, None] & (_least_gap(members, others) > 0.0)
    # no rival at all stands behind -inf
    is_ahead |= np.isneginf(near_high)[:, None, :]
    beyond = rivals.max(axis=1)
    is_far = (low.min(axis=1) > beyond) | np.isneginf(beyond)
    return np.all(is_ahead, axis=(1, 2)) & is_far


def _least_gap(ahead: Enclosure, behind: Enclosure) -> np.ndarray:
    """Lower bounds of the difference of each two quantities, (rectangles, ahead, behind)."""
    half = ahead.half[:, :, None, None]
    change = np.abs(ahead.along_x[:, :, None] - behind.along_x[:, None, :]) * half[:, 0]
    change += np.abs(ahead.along_y[:, :, None] - behind.along_y[:, None, :]) * half[:, 1]
    change += ahead.rest[:, :, None] + behind.rest[:, None, :]
    return ahead.value[:, :, None] - behind.value[:, None, :] - change * (1.0 + SPARE)


def _kept_groups(scores: Enclosure, groups: GroupMask) -> MaskedGroups:
    """Groups that are provably unchanged or perhaps, from which group is ahead of which."""
    size = scores.value.shape[1] // groups.num_groups
    at_centre = selection.kept_groups(selection.group_scores(scores.value, groups), groups.num_kept)
    count = 1 if groups.score == "max" or size == 1 else 2
    low, high = (_top_sum(bound, groups.num_groups, count) for bound in (scores.low, scores.high))
    always, perhaps = _surviving(low[:, :, None] > high[:, None, :], groups.num_kept)
    left = np.flatnonzero(np.any(always != perhaps, axis=1))
    if len(left):
        ahead = low[left][:, :, None] > high[left][:, None, :]
        ahead |= _groups_ahead(_rows(scores, left), low[left], groups.num_groups, count)
        always[left], perhaps[left] = _surviving(ahead, groups.num_kept)
    return MaskedGroups(at_centre, always, perhaps)


def _surviving(ahead: np.ndarray, num_kept: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups ahead of all that can be dropped, and groups that not too many are ahead of."""
    always = ahead.sum(axis=2) >= ahead.shape[1] - num_kept
    return np.asarray(always), np.asarray(ahead.sum(axis=1) < num_kept)


def _top_sum(bound: np.ndarray, num_groups: int, count: int) -> np.ndarray:
    """Sum of the one or two largest of each group."""
    grouped = bound.reshape(len(bound), num_groups, -1)
    if count == 1:
        return grouped.max(axis=2)
    return np.partition(grouped, -2, axis=2)[:, :, -2:].sum(axis=2)


def _groups_ahead(scores: Enclosure, low: np.ndarray, num_groups: int, count: int) -> np.ndarray:
    """Whether group g is ahead of group h, by the leaders of g at the centre.

    The score of g is at least that of its leaders at the centre; the score of h is that of some of
    its experts: each one or two of the first four, or fewer of them and the best of the rest.
    """
    rectangles, experts = scores.value.shape
    size = experts // num_groups
    number = min(MOST_LEADERS, size)
    grouped = scores.value.reshape(rectangles, num_groups, size)
    order = np.argsort(-grouped, axis=2, kind="stable")
    first = (np.arange(num_groups) * size)[:, None]
    leaders = (order[:, :, :number] + first).reshape(rectangles, -1)
    taken = _taken(scores, leaders)
    best = _sums(taken, num_groups, [tuple(range(count))])
    parties = list(combinations(range(number), count))
    gap = _least_gap(best, _sums(taken, num_groups, parties))
    shape = rectangles, num_groups, num_groups, len(parties)
    ahead = np.all(gap.reshape(shape) > 0.0, axis=3)
    if number == size:
        return ahead
    high = np.take_along_axis(scores.high.reshape(grouped.shape), order, axis=2)
    beyond = high[:, :, number:].max(axis=2)
    if count == 2:
        beyond = beyond + high.max(axis=2)
    return ahead & (low[:, :, None] > beyond[:, None, :])


def _sums(leaders: Enclosure, num_groups: int, parties: list[tuple[int, ...]]) -> Enclosure:
    """Sums of the leaders of each group: (rectangles, groups x parties)."""

    def total(array: Float64[np.ndarray, "rectangles leaders"]) -> np.ndarray:
        grouped = array.reshape(len(array), num_groups, -1)
        return grouped[:, :, np.array(parties)].sum(axis=3).reshape(len(array), -1)

    return leaders.each(total)


def _taken(scores: Enclosure, experts: np.ndarray) -> Enclosure:
    """Some experts of each rectangle."""
    return scores.each(lambda array: np.take_along_axis(array, experts, axis=1))


def _rows(scores: Enclosure, rows: np.ndarray) -> Enclosure:
    """Some of the rectangles."""
    return scores.each(lambda array: array[rows], scores.half[rows])


#: Samples of a pixel: its corners, a little to the inside, opposite ones first, and its centre.
_SAMPLES = np.array([[-1, -1], [1, 1], [-1, 1], [1, -1], [0, 0]]) * (1.0 - 2.0**-6)
#: Parts of open pixels that are looked at together; pixels stay open where that were more.
MOST_PARTS = 1 << 20
_FAR = np.iinfo(np.int32).max


def plane_raster(
    router: PlaneRouter,
    frame: Frame,
    depth: int = 3,
    advance: Callable[[int], None] = lambda more: None,
) -> Raster:
    """Which set a router of any rule chooses at each point of a frame, by pixels.

    Pixels are halved up to ``depth`` times. What is proved holds for the numbers of the router on
    the plane, both for the exact rule and for its evaluation in float64. A tie that does not go
    away is never proved. Time grows with the length of the facets in pixels; ``advance`` hears how
    many more of them are decided.

    Raises ValueError where the frame is empty, or its pixels are too small for float64. Oracle in
    tests: the rule at random points, and exact arithmetic for affine rules.
    """
    check_frame(frame, depth)
    sets = ExpertSets()
    label = np.full((frame.height, frame.width), -1, dtype=np.int32)
    state = np.full(label.shape, PixelState.OPEN, dtype=np.uint8)
    bounds = np.array([[0, frame.width, 0, frame.height]])
    while len(bounds):
        is_proved, number = proved_sets(router, frame.rectangles(bounds, 1), sets)
        _fill(label, bounds[is_proved], number[is_proved])
        advance(int(np.diff(bounds[is_proved])[:, ::2].prod(axis=1).sum()))
        bounds = bounds[~is_proved]
        is_pixel = (bounds[:, 1] - bounds[:, 0] == 1) & (bounds[:, 3] - bounds[:, 2] == 1)
        bounds = _split(bounds[~is_pixel])
    state[label >= 0] = PixelState.CONSTANT
    rows, columns = np.nonzero(label < 0)
    pixels = np.stack([columns, columns + 1, rows, rows + 1], axis=1)
    if len(pixels):
        label[rows, columns], state[rows, columns] = _looked_into(
            router, frame, pixels, depth, sets, advance
        )
    return _in_order(label, state, sets)


def _fill(
    label: Int32[np.ndarray, "height width"],
    bounds: Int64[np.ndarray, "n 4"],
    number: Int32[np.ndarray, "n"],
) -> None:
    """All pixels of each rectangle get its number; rectangles of one shape at once."""
    shapes = np.stack([bounds[:, 1] - bounds[:, 0], bounds[:, 3] - bounds[:, 2]], axis=1)
    for wide, high in np.unique(shapes, axis=0):
        same = np.flatnonzero((shapes == (wide, high)).all(axis=1))
        columns = bounds[same, 0][:, None, None] + np.arange(wide)[None, None, :]
        rows = bounds[same, 2][:, None, None] + np.arange(high)[None, :, None]
        label[rows, columns] = number[same][:, None, None]


def _split(bounds: Int64[np.ndarray, "n 4"]) -> Int64[np.ndarray, "m 4"]:
    """Halves of each side that is longer than 1."""
    for low, high in ((0, 1), (2, 3)):
        is_long = bounds[:, high] - bounds[:, low] > 1
        middle = (bounds[:, low] + bounds[:, high]) // 2
        first, second = bounds.copy(), bounds[is_long].copy()
        first[is_long, high] = second[:, low] = middle[is_long]
        bounds = np.concatenate([first, second])
    return bounds


def _looked_into(
    router: PlaneRouter,
    frame: Frame,
    pixels: Int64[np.ndarray, "n 4"],
    depth: int,
    sets: ExpertSets,
    advance: Callable[[int], None],
) -> tuple[Int32[np.ndarray, "n"], UInt8[np.ndarray, "n"]]:
    """Labels and states of pixels that were not proved as a whole.

    Of each pixel the lowest and the highest number of a proved set is kept: points, and parts that
    are proved as a whole. It is crossed where they differ, constant where no part is left. Where
    nothing is proved at any of five points a tie stays, which halving would not end.
    """
    lowest = np.full(len(pixels), _FAR, dtype=np.int32)
    highest = np.full(len(pixels), -1, dtype=np.int32)
    is_open = np.zeros(len(pixels), dtype=bool)
    owner = np.arange(len(pixels))
    bounds, parts, before = pixels, 1, 0
    for level in range(depth + 1):
        if level and 4 * len(bounds) > MOST_PARTS:
            break
        if level:
            bounds, parts = _split(2 * bounds), 2 * parts
            owner = np.tile(owner, 4)
            is_proved, number = proved_sets(router, frame.rectangles(bounds, parts), sets)
            _note(lowest, highest, owner[is_proved], number[is_proved])
            bounds, owner = bounds[~is_proved], owner[~is_proved]
        bounds, owner = _without(bounds, owner, lowest < highest)
        for sample in _SAMPLES:
            rectangles = frame.rectangles(bounds, parts)
            points = rectangles.centre + sample * (rectangles.half - frame.padding)
            is_proved, number = proved_sets(router, Rectangles(points, np.zeros_like(points)), sets)
            _note(lowest, highest, owner[is_proved], number[is_proved])
            bounds, owner = _without(bounds, owner, lowest < highest)
            num_decided = int(np.count_nonzero(lowest < highest))
            advance(num_decided - before)
            before = num_decided
        is_open[owner[highest[owner] < 0]] = True
        bounds, owner = _without(bounds, owner, is_open)
    advance(len(pixels) - before)
    is_open[owner] = True
    state = np.where(is_open, PixelState.OPEN, PixelState.CONSTANT).astype(np.uint8)
    state[lowest < highest] = PixelState.CROSSED
    label = lowest
    others = np.flatnonzero(state != PixelState.CONSTANT)
    centre = frame.rectangles(pixels[others], 1).centre
    for some in chunks(len(others), router):
        label[others[some]] = sets.numbered(router.choice(centre[some]))
    return label, state


def _note(lowest: np.ndarray, highest: np.ndarray, owner: np.ndarray, number: np.ndarray) -> None:
    np.minimum.at(lowest, owner, number)
    np.maximum.at(highest, owner, number)


def _without(
    bounds: np.ndarray, owner: np.ndarray, is_done: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What belongs to pixels that are not done."""
    left = ~is_done[owner]
    return bounds[left], owner[left]


def _in_order(label: np.ndarray, state: np.ndarray, sets: ExpertSets) -> Raster:
    expert_sets = sets.listed()
    order = sorted(range(len(expert_sets)), key=expert_sets.__getitem__)
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return Raster(place[label], state, tuple(expert_sets[i] for i in order))


#: Numbers of one array of a chunk, of segments and of rectangles: all arrays together stay within
#: some 50 MB.
CHUNK, _OF_RECTANGLES = 1 << 15, 1 << 17


class ExpertSets:
    """Numbers of chosen sets, in the order in which they are first met."""

    def __init__(self) -> None:
        self._number: dict[bytes, int] = {}
        self._size = 0

    def numbered(self, chosen: np.ndarray) -> Int32[np.ndarray, "n"]:
        """Number of each row, new ones included."""
        rows = np.ascontiguousarray(chosen, dtype=np.int32)
        self._size = rows.shape[1]
        number = self._number
        keys = rows.view(f"V{rows.itemsize * self._size}").ravel().tolist()
        return np.array([number.setdefault(key, len(number)) for key in keys], dtype=np.int32)

    def listed(self) -> list[tuple[int, ...]]:
        """All sets so far, by number."""
        return [tuple(np.frombuffer(key, dtype=np.int32).tolist()) for key in self._number]


def proved_sets(
    router: PlaneRouter, rectangles: Rectangles, sets: ExpertSets
) -> tuple[Bool[np.ndarray, "n"], Int32[np.ndarray, "n"]]:
    """Whether one set is chosen on each rectangle, and its number (-1 where it is not proved)."""
    is_proved = np.zeros(len(rectangles.centre), dtype=bool)
    number = np.full(len(is_proved), -1, dtype=np.int32)
    for some in chunks(len(is_proved), router):
        part = Rectangles(rectangles.centre[some], rectangles.half[some])
        is_proved[some], chosen = certain_choice(score_ranges(router, part), router.rule)
        hits = np.flatnonzero(is_proved[some])
        number[some][hits] = sets.numbered(chosen[hits])
    return is_proved, number


def chunks(total: int, router: PlaneRouter) -> Iterator[slice]:
    """Slices of so many rectangles that their arrays stay within a cache."""
    experts = len(router.offset)
    groups = 0 if router.rule.groups is None else router.rule.groups.num_groups
    pairs = max(router.rule.top_k * min(experts, 16), 6 * groups * groups)
    step = max(_OF_RECTANGLES // max(experts, pairs), 1)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))
