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

from moegeom.core.shapes import Float64

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
