"""Distance to the boundary of a cell whose walls are curved, with a bracket."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int32

from moegeom.geometry.boundary.curved_rows import CurvedRows
from moegeom.geometry.boundary.curved_wall import Wall, wall_distance
from moegeom.geometry.boundary.linear import NEVER
from moegeom.geometry.boundary.score_curve import ScoreCurve
from moegeom.geometry.selection.logit_map import mapped_logits
from moegeom.geometry.selection.score import SCORES

#: Rounding of a bound: what is nearer than this share is looked at all the same.
_SAFE = 1.0 + 1e-9
#: Stands for no limit, so that products with zero stay zero.
_FAR = 1e200


@dataclass(frozen=True, eq=False)
class CurvedBoundary:
    """Bounds of the distance, and the pair (expert out, expert in) of the nearest wall.

    ``pair`` is (-1, -1) where no wall exists or the nearest one is not known. ``step`` is what the
    step of length ``upper`` adds to the logits, times the multiplier (for softmax, up to a common
    shift); nan where there is none.
    """

    lower: Float64[np.ndarray, "tokens"]
    upper: Float64[np.ndarray, "tokens"]
    pair: Int32[np.ndarray, "tokens 2"]
    step: Float64[np.ndarray, "tokens experts"]


@dataclass(frozen=True)
class Nearest:
    """The nearest wall of one token so far."""

    lower: float = math.inf
    upper: float = math.inf
    pair: tuple[int, int] = (-1, -1)
    logits: tuple[float, float] = (math.nan, math.nan)

    def after(self, wall: Wall, pair: tuple[int, int]) -> Nearest:
        """The nearer of this and another wall."""
        lower = min(self.lower, wall.lower)
        if wall.upper >= self.upper:
            return Nearest(lower, self.upper, self.pair, self.logits)
        return Nearest(min(lower, wall.upper), wall.upper, pair, wall.logits)


def curved_boundary(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rows: CurvedRows,
) -> CurvedBoundary:
    r"""Distance from each router input to the boundary of its cell, ungrouped rules of one logit.

    .. math:: d(y) = \min_{i \in S,\, j \notin S} d_{ij}, \quad
        d_{ij} = \min \{|y' - y| : f(z_i') + c_i = f(z_j') + c_j\}

    Exact for every increasing f, because the way to another choice crosses some such wall; each
    d_ij is certified (:mod:`moegeom.geometry.boundary.curved_wall`): ``lower >= (1 - 1e-6) upper``,
    up to the rounding of logits and scores. In units of the router input. 0 on a wall and on a
    permanent tie (equal rows, biases and selection biases); inf when every expert is chosen, or no
    pair can ever tie. Pairs with equal selection biases have straight walls, those of
    docs/theory.md A3.

    The input is free to go anywhere: behind a norm it stays on an ellipsoid, and the distance along
    that is no less (docs/theory.md E3).

    Source: docs/theory.md E1. Oracle in tests: scipy.optimize.minimize (SLSQP).
    """
    found = []
    steps = np.empty(logits.shape)
    multiplied = logits.astype(np.float64) * rows.multiplier
    for z, members, step in zip(multiplied, chosen, steps, strict=True):
        is_open = np.ones(len(z), dtype=bool)
        is_open[members] = False
        found.append(nearest := nearest_wall(z, members, is_open, rows))
        step[:] = step_to_wall(z, nearest.pair, nearest.logits, rows)
    return CurvedBoundary(
        np.array([n.lower for n in found]),
        np.array([n.upper for n in found]),
        np.array([n.pair for n in found], dtype=np.int32).reshape(-1, 2),
        steps,
    )


def nearest_wall(
    z: Float64[np.ndarray, "experts"],
    members: Int32[np.ndarray, "k"],
    is_open: Bool[np.ndarray, "experts"],
    rows: CurvedRows,
) -> Nearest:
    """The nearest wall between one of ``members`` and an expert that ``is_open``, one token.

    ``members`` come in descending order of selection scores. Pairs are passed over when bounds
    of the slopes within the best distance so far put their wall beyond it.
    """
    curve = _curve(rows)
    nearest = Nearest()
    if len(members) == 0 or not is_open.any():
        return nearest
    q = selection_of(z, rows)
    last = int(members[-1])
    first_out = int(np.argmax(np.where(is_open, q, -np.inf)))
    nearest = nearest.after(pair_wall(curve, z, last, first_out, rows), (last, first_out))
    least, most = slope_range(z, nearest.upper, rows)
    reach = min(nearest.upper, _FAR) * most * rows.length * _SAFE
    for i in members[::-1].tolist():
        for j in np.flatnonzero(is_open & (q[i] - reach[i] <= q + reach)).tolist():
            if (i, j) == (last, first_out) or nearest.upper == 0.0:
                continue
            steepest = _steepest_difference(i, j, least, most, rows)
            if q[i] - q[j] <= min(nearest.upper, _FAR) * steepest * _SAFE:
                wall = pair_wall(curve, z, i, j, rows, nearest.upper)
                nearest = nearest.after(wall, (i, j))
    return nearest


def pair_wall(
    curve: ScoreCurve,
    z: Float64[np.ndarray, "experts"],
    i: int,
    j: int,
    rows: CurvedRows,
    limit: float = math.inf,
) -> Wall:
    """Distance to the wall of one pair, straight where the two have equal selection biases."""
    u, v = float(z[i]), float(z[j])
    delta = float(rows.bias[i] - rows.bias[j])
    if delta == 0.0:
        distance = max(u - v, 0.0) * float(rows.distances.inverse[i, j])
        if distance >= min(limit, NEVER):
            return Wall(math.inf, math.inf, (math.nan, math.nan))
        step = distance * float(rows.distances.inverse[i, j])
        gram = rows.gram
        there = (
            u - step * float(gram[i, i] - gram[i, j]),
            v - step * float(gram[i, j] - gram[j, j]),
        )
        return Wall(distance, distance, there)
    first = float(rows.length[i])
    along = float(rows.gram[i, j]) / first if first > 0.0 else float(rows.length[j])
    return wall_distance(curve, (u, v), (first, along, float(rows.across[i, j])), delta, limit)


def selection_of(
    z: Float64[np.ndarray, "experts"], rows: CurvedRows
) -> Float64[np.ndarray, "experts"]:
    """Selection scores of one token from logits that are multiplied already."""
    mapped = mapped_logits(z[None], rows.cap)
    return SCORES[rows.rule.score](mapped)[0] + rows.bias


def slope_range(
    z: Float64[np.ndarray, "experts"], radius: float, rows: CurvedRows
) -> tuple[Float64[np.ndarray, "experts"], Float64[np.ndarray, "experts"]]:
    """Least and largest slope of each score within ``radius`` of the input.

    The logarithm of a slope changes by at most ``log_slope`` per unit of the logit, and no logit
    by more than the longest row per unit of distance.
    """
    curve = _curve(rows)
    slope = np.array([curve.at(float(logit)).slope for logit in z])
    exponent = min(radius, _FAR) * curve.bends.log_slope * float(rows.length.max())
    factor = math.exp(min(exponent, 600.0)) * _SAFE
    return slope / factor, np.minimum(np.maximum(slope, 1e-300) * factor, curve.bends.steepest)


def _steepest_difference(
    i: int,
    j: int,
    least: Float64[np.ndarray, "experts"],
    most: Float64[np.ndarray, "experts"],
    rows: CurvedRows,
) -> float:
    """Largest norm of s w_i - t w_j over slopes s and t within their bounds: at a corner."""
    squared = max(
        s * s * rows.gram[i, i] - 2.0 * s * t * rows.gram[i, j] + t * t * rows.gram[j, j]
        for s in (least[i], most[i])
        for t in (least[j], most[j])
    )
    return math.sqrt(max(float(squared), 0.0))


def _curve(rows: CurvedRows) -> ScoreCurve:
    if rows.curve is None:
        raise TypeError("softmax scores have no curve of one logit")
    return rows.curve


def step_to_wall(
    z: Float64[np.ndarray, "experts"],
    pair: tuple[int, int],
    there: tuple[float, float],
    rows: CurvedRows,
) -> Float64[np.ndarray, "experts"]:
    """What the shortest step adds to all logits that takes those of a pair ``there``."""
    i, j = pair
    if i < 0 or math.isnan(there[0]):
        return np.full(len(z), np.nan)
    du, dv = there[0] - z[i], there[1] - z[j]
    length, across = float(rows.length[i]), float(rows.across[i, j])
    if length == 0.0:
        return rows.gram[:, j] * (dv / rows.gram[j, j] if dv != 0.0 else 0.0)
    along, x = rows.gram[i, j] / length, du / length
    of_j = (dv - along * x) / across**2 if across > 0.0 else 0.0
    return rows.gram[:, i] * (x - along * of_j) / length + rows.gram[:, j] * of_j
