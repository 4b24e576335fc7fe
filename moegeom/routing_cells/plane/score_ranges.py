"""Selection scores of every rule over rectangles of a plane."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moegeom.geometry.boundary.curved import BENDS
from moegeom.geometry.rows import LEAST_LENGTH
from moegeom.routing_cells.plane.raster_enclosure import (
    FLOOR,
    SPARE,
    UNIT,
    Enclosure,
    Rectangles,
    composed,
    product,
)
from moegeom.routing_cells.plane.raster_frame import PlaneLength, PlaneRouter

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
