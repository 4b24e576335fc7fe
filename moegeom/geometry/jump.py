"""How far the output of a mixture of experts jumps where its chosen set changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.core.router import LogitMap
from moegeom.core.shapes import Bool, Float, Float64, Int, Int32
from moegeom.geometry.selection import SCORES, mapped_logits

#: Experts [points, slots], -1 for none, and their routing weights.
Weighted = tuple[Int[np.ndarray, "_ _"], Float64[np.ndarray, "_ _"]]

#: What weighted experts make of inputs [tokens, hidden]: a sum for each, [tokens, outputs].
Mixture = Callable[[Any, Any, Any], Any]


# ---------------------------------------------------------------------------------- on the boundary
@dataclass(frozen=True, eq=False)
class NearestTie:
    """The point of a boundary that is nearest to each input, and the way there.

    ``normal`` has length 1 and points to the side on which the first expert of the pair is chosen;
    ``distance`` is |y - y*|. nan in all of them where the point is not known.
    """

    point: Float64[np.ndarray, "tokens hidden"]
    normal: Float64[np.ndarray, "tokens hidden"]
    distance: Float64[np.ndarray, "tokens"]

    @property
    def is_known(self) -> Bool[np.ndarray, "tokens"]:
        return np.isfinite(self.distance)


def linear_tie(
    inputs: Float[np.ndarray, "tokens hidden"],
    pair: Int[np.ndarray, "tokens 2"],
    weight: Float[np.ndarray, "experts hidden"],
    bias: Float[np.ndarray, "experts"] | None = None,
) -> NearestTie:
    r"""The nearest point at which two experts of an affine rule tie.

    .. math:: y^* = y - \frac{z_i - z_j}{\lVert w_i - w_j \rVert^2} (w_i - w_j), \quad
        \hat n = \frac{w_i - w_j}{\lVert w_i - w_j \rVert}

    Logits are computed from the rows in float64. In units of the router input. nan for a pair
    (-1, -1) and for equal rows, which have no boundary or are tied everywhere.

    Source: docs/theory.md A3, A13 (S0 appendix B.3, with the nearest pair: F-07). Oracle in tests:
    SLSQP on the tie.
    """
    y, rows = inputs.astype(np.float64), weight.astype(np.float64)
    apart = rows[pair[:, 0]] - rows[pair[:, 1]]
    offset = np.zeros(len(rows)) if bias is None else bias.astype(np.float64)
    ahead = np.einsum("td,td->t", y, apart) + offset[pair[:, 0]] - offset[pair[:, 1]]
    length = np.sqrt((apart**2).sum(axis=1))
    length[(pair < 0).any(axis=1) | (length == 0.0)] = np.nan
    normal = apart / length[:, None]
    distance = ahead / length
    return NearestTie(y - distance[:, None] * normal, normal, distance)


#: The logit of each score that increases, for scores that one logit makes.
_INVERSES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda score: score,
    "sigmoid": lambda score: np.log(score) - np.log1p(-score),
    "sqrt_softplus": lambda score: np.log(np.expm1(score**2)),
}

#: Points of the first grid, of each finer one, and how many there are: to 2^-40 of the range.
_COARSE, _FINE, _ZOOMS = 257, 17, 12

#: How far beyond a known distance the point may be for it to be the nearest one.
_AS_NEAR = 1e-5


def curved_tie(
    inputs: Float[np.ndarray, "tokens hidden"],
    pair: Int[np.ndarray, "tokens 2"],
    weight: Float[np.ndarray, "experts hidden"],
    score: str,
    logit_map: LogitMap | None,
    logit_bias: Float[np.ndarray, "experts"] | None,
    selection_bias: Float[np.ndarray, "experts"] | None,
    distance: Float64[np.ndarray, "tokens"],
) -> NearestTie:
    r"""The nearest point at which :math:`f(z_i) + c_i = f(z_j) + c_j`, f a score of one logit.

    Only the two logits matter: with u for the first, the second is
    :math:`v(u) = f^{-1}(f(u) + c_i - c_j)`, and the way there has the square
    :math:`(du, dv) K^{-1} (du, dv)^T`, K the Gram matrix of both rows, which a grid that is made
    finer around its least point minimises. ``distance`` is that of the boundary; the point counts
    where it is no farther than 1e-5 of it more, else it is nan: a pair (-1, -1), parallel rows, an
    input on the boundary itself, a score that is no function of one logit (softmax).

    Source: docs/theory.md E1, A13. Oracle in tests: SLSQP on the tie.
    """
    y, tokens = inputs.astype(np.float64), len(inputs)
    unknown = NearestTie(
        np.full(y.shape, np.nan), np.full(y.shape, np.nan), np.full(tokens, np.nan)
    )
    tried = np.flatnonzero((pair >= 0).all(axis=1) & np.isfinite(distance) & (distance > 0.0))
    if score not in _INVERSES or not len(tried):
        return unknown
    rows = weight.astype(np.float64)
    zeros = np.zeros(len(rows))
    offset = zeros if logit_bias is None else logit_bias.astype(np.float64)
    chosen_by = zeros if selection_bias is None else selection_bias.astype(np.float64)
    first, second = pair[tried].T
    one, other = rows[first], rows[second]
    curve = _Curve(score, logit_map)
    here = np.stack(
        [np.einsum("td,td->t", y[tried], row) for row in (one, other)], axis=1
    ) + np.stack([offset[first], offset[second]], axis=1)
    gram = np.stack([one, other], axis=1) @ np.stack([one, other], axis=2)
    ahead = (chosen_by[first] - chosen_by[second])[:, None]

    def steps(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Multiples of both rows that lead to the tie at the logit u, and the square of the way."""
        du, dv = u - here[:, :1], curve.logit(curve.score(u) + ahead) - here[:, 1:]
        a, b, c = (gram[:, i, j][:, None] for i, j in ((0, 0), (0, 1), (1, 1)))
        determinant = a * c - b * b
        multiples = np.stack([c * du - b * dv, a * dv - b * du]) / determinant
        square = multiples[0] * du + multiples[1] * dv
        return multiples, np.where(square >= 0.0, square, np.inf)

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        centre = here[:, :1]
        reach = distance[tried, None] * np.sqrt(gram[:, :1, 0])
        for zoom in range(_ZOOMS):
            grid = np.linspace(-1.0, 1.0, _FINE if zoom else _COARSE)
            at = centre + reach * grid
            best = np.argmin(steps(at)[1], axis=1)[:, None]
            centre = np.take_along_axis(at, best, axis=1)
            reach = reach * (grid[1] - grid[0])
        multiples, square = steps(centre)
        length = np.sqrt(square[:, 0])
        way = multiples[0] * one + multiples[1] * other
        near = (length > 0.0) & (length <= distance[tried] * (1.0 + _AS_NEAR))
        normal = -way / length[:, None]
    unknown.point[tried[near]] = y[tried[near]] + way[near]
    unknown.normal[tried[near]] = normal[near]
    unknown.distance[tried[near]] = length[near]
    return unknown


@dataclass(frozen=True)
class _Curve:
    """A score of one logit behind a map, and its inverse; nan for scores that no logit has."""

    name: str
    logit_map: LogitMap | None

    def score(self, logits: np.ndarray) -> np.ndarray:
        return SCORES[self.name](mapped_logits(logits, self.logit_map))

    def logit(self, score: np.ndarray) -> np.ndarray:
        mapped = _INVERSES[self.name](score)
        if self.logit_map is None:
            return mapped
        cap, multiplier = self.logit_map.soft_cap, self.logit_map.multiplier
        if np.isfinite(cap):
            mapped = cap * np.arctanh(mapped / cap)
        return mapped / multiplier


# ------------------------------------------------------------------------------------------ outputs
def jump(
    point: Float64[np.ndarray, "tokens hidden"], before: Weighted, after: Weighted, mixed: Mixture
) -> Float64[np.ndarray, "tokens"]:
    r"""Length of the change of the output where one set of experts takes over from another.

    .. math:: J =
        \Bigl\lVert \sum_{i \in S} g_i E_i(y^*) - \sum_{i \in S'} g'_i E_i(y^*) \Bigr\rVert

    Each side has the routing weights of its own set at y*. 0 for equal sides; nan where the point
    is.

    Source: docs/theory.md A13. Oracle in tests: the output a step of 1e-6 on either side.
    """
    return jump_beside(point, before, after, point[:0], (before[0][:0], before[1][:0]), mixed)[0]


def jump_beside(
    point: Float64[np.ndarray, "tokens hidden"],
    before: Weighted,
    after: Weighted,
    inputs: Float64[np.ndarray, "others hidden"],
    chosen: Weighted,
    mixed: Mixture,
) -> tuple[Float64[np.ndarray, "tokens"], Float64[np.ndarray, "others"]]:
    """:func:`jump`, and the length of the output at other inputs, in one call of ``mixed``: every
    expert is read once.
    """
    rows = np.flatnonzero(np.isfinite(point).all(axis=1))
    sides = _differing((before[0][rows], before[1][rows]), (after[0][rows], after[1][rows]))
    points = np.concatenate([point[rows], point[rows], inputs])
    experts, weights = (
        np.concatenate([sides[0][part], sides[1][part], chosen[part]]) for part in (0, 1)
    )
    one, other, output = np.split(mixed(points, experts, weights), [len(rows), 2 * len(rows)])
    height = np.full(len(point), np.nan)
    height[rows] = _length(one - other)
    return height, _length(output)


def _length(rows: Float64[np.ndarray, "rows outputs"]) -> Float64[np.ndarray, "rows"]:
    return np.sqrt((rows**2).sum(axis=1))


def _differing(before: Weighted, after: Weighted) -> tuple[Weighted, Weighted]:
    """Both sides without the experts that they weigh alike, bit for bit: those cancel."""
    experts, others = before[0].astype(np.int64), after[0].astype(np.int64)
    alike = (experts[:, :, None] == others[:, None, :]) & (
        before[1][:, :, None] == after[1][:, None, :]
    )
    experts[alike.any(axis=2)] = -1
    others[alike.any(axis=1)] = -1
    return (experts, before[1]), (others, after[1])


def exchanged(
    chosen: Int[np.ndarray, "tokens k"], pair: Int[np.ndarray, "tokens 2"]
) -> Int32[np.ndarray, "tokens k"]:
    """The set behind the boundary: the second expert of the pair in the slot of the first.

    The set itself where the first one is not in it. Oracle in tests: sets of Python.
    """
    return np.where(chosen == pair[:, :1], pair[:, 1:], chosen).astype(np.int32)


# ------------------------------------------------------------------------------------- along a line
@dataclass(frozen=True, eq=False)
class SpreadByRadius:
    """How far a function gets within r of 0, and how that grows.

    ``whole`` is over all outputs together, ``one`` over ``coordinate`` alone; slopes are
    d ln G / d ln r between neighbouring radii, nan for the first and where nothing spreads.
    """

    radius: Float64[np.ndarray, "radii"]
    whole: Float64[np.ndarray, "radii"]
    one: Float64[np.ndarray, "radii"]
    coordinate: int
    slope: Float64[np.ndarray, "radii"]
    one_slope: Float64[np.ndarray, "radii"]


def spread_within(
    offset: Float64[np.ndarray, "points"],
    output: Float64[np.ndarray, "points outputs"],
    radius: Float64[np.ndarray, "radii"],
    coordinate: int | None = None,
) -> SpreadByRadius:
    r""":math:`G(r) = \max_{l, l' \in [-r, r]} \lVert f(l) - f(l') \rVert` over points on a line.

    ``offset`` is l, in any order; ``radius`` ascends. Every pair of the points within r counts: G
    grows with r, and is 0 with fewer than two. A jump at 0 makes G level off at its height as r
    shrinks (slope 0); where f has a derivative there, G is a multiple of r (slope 1). Without a
    ``coordinate`` it is the one that spreads most over all points.

    Source: docs/theory.md A13 (S0 section 7.1). Oracle in tests: scipy's pdist.
    """
    order = np.argsort(np.abs(offset), kind="stable")
    far, values = np.abs(offset)[order], output[order] - output.mean(axis=0)
    span = np.maximum.accumulate(values, axis=0) - np.minimum.accumulate(values, axis=0)
    coordinate = int(np.argmax(span[-1])) if coordinate is None else coordinate
    furthest = np.array([_length(values[: i + 1] - values[i]).max() for i in range(len(values))])
    within = np.searchsorted(far, radius, side="right") - 1
    reached = within >= 0
    whole = np.where(reached, np.maximum.accumulate(furthest)[within], 0.0)
    one = np.where(reached, span[within, coordinate], 0.0)
    return SpreadByRadius(
        radius, whole, one, coordinate, _slope(radius, whole), _slope(radius, one)
    )


def _slope(
    radius: Float64[np.ndarray, "radii"], spread: Float64[np.ndarray, "radii"]
) -> Float64[np.ndarray, "radii"]:
    with np.errstate(divide="ignore", invalid="ignore"):
        rise = np.diff(np.log(spread)) / np.diff(np.log(radius))
    return np.concatenate([[np.nan], np.where(np.isfinite(rise), rise, np.nan)])
