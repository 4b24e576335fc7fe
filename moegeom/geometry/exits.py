r"""Through which boundary a moving router input leaves its cell: walks that never meet time.

The input moves as :math:`dx = F\,dB`; in coordinates where F is the unit matrix it leaves a ball
through a point whose law is known, so it is moved from ball to ball. Only distances to boundaries
are computed, no step of time is chosen, and the law of the exit has no bias but the width at which
a walk counts as having arrived.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float64, Int32
from moegeom.geometry.boundary.linear import NEVER, RowDistances
from moegeom.geometry.boundary.order_distance import row_coordinates

#: Share of the first distance at which a walk has arrived.
ARRIVED = 1e-6

#: Largest distance of a ball's centre from the walk, in distances to the nearest boundary: where
#: there is one boundary only, a ball of this size stands for its half-space.
_FARTHEST = 1e9

#: Balls of one walk at most; walks of 256 experts take a tenth of it.
MOST_BALLS = 20_000

#: Gaps held at once.
_AT_ONCE = 2**20

#: 1 - cos of two normals below which the boundaries count as parallel.
_PARALLEL = 1e-12


@dataclass(frozen=True, eq=False)
class Exits:
    """By token and walk: the boundary that was crossed (expert out, expert in), and how near the
    next boundary was there, in distances of the token to its nearest boundary.

    (-1, -1) and nan where there is no boundary in reach, or the walk has not arrived.
    """

    pair: Int32[np.ndarray, "tokens walks 2"]
    second: Float64[np.ndarray, "tokens walks"]


def exit_boundaries(
    logits: Float64[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rows: Float64[np.ndarray, "experts noises"],
    distances: RowDistances,
    walks: int,
    generator: np.random.Generator,
    most_balls: int = MOST_BALLS,
) -> Exits:
    r"""The boundaries through which ``walks`` walks from each input leave its cell.

    ``rows`` are those of :func:`~moegeom.geometry.noise.noisy_rows` and ``distances`` theirs. Each
    ball touches the nearest boundary, at the distance d, and no other one is inside: its centre is
    s further inwards, :math:`s = \min (d_p - d) / (1 - \cos_p)` over the other boundaries. Along a
    random line through the walk the ball is left at one of its two ends, each with a probability in
    proportion to the distance of the other, which is the exit law of Brownian motion from a ball,
    off its centre too. Near one boundary alone the distance is squared from ball to ball. A walk
    ends at 1e-6 of the first distance; on a boundary it ends at once. The law of the exit does not
    depend on the size of the noise, and is that of a path without drift. Source: docs/theory.md A9.
    Oracle in tests: angles of a wedge, ends of an interval, harmonic measure of a quadrant, and
    paths in small steps.
    """
    tokens, k = chosen.shape
    num_pairs = max(k * (logits.shape[1] - k), 1)
    pair = np.full((tokens, walks, 2), -1, dtype=np.int32)
    second = np.full((tokens, walks), np.nan)
    if k < logits.shape[1]:
        moves = row_coordinates(rows)
        size = max(1, _AT_ONCE // (num_pairs * walks))
        for start in range(0, tokens, size):
            part = slice(start, start + size)
            cells = _Cells.of(chosen[part], moves, distances)
            ends = _walked(logits[part].astype(np.float64), cells, walks, generator, most_balls)
            pair[part], second[part] = ends
    return Exits(pair, second)


@dataclass(frozen=True, eq=False)
class _Cells:
    """Chosen experts, the others, and their inverse distances, by cell; rows and products."""

    inside: Int32[np.ndarray, "cells k"]
    outside: Int32[np.ndarray, "cells others"]
    inverse: Float64[np.ndarray, "cells k others"]
    moves: Float64[np.ndarray, "experts dims"]
    gram: Float64[np.ndarray, "experts experts"]

    @classmethod
    def of(
        cls,
        chosen: Int32[np.ndarray, "cells k"],
        moves: Float64[np.ndarray, "experts dims"],
        distances: RowDistances,
    ) -> _Cells:
        is_other = np.ones((len(chosen), len(moves)), dtype=bool)
        np.put_along_axis(is_other, chosen.astype(np.int64), False, axis=1)
        outside = np.nonzero(is_other)[1].reshape(len(chosen), -1).astype(np.int32)
        inverse = distances.inverse[chosen[:, :, None], outside[:, None, :]]
        return cls(chosen, outside, inverse, moves, moves @ moves.T)

    def over_lengths(
        self, cell: np.ndarray, values: Float64[np.ndarray, "walks experts"]
    ) -> Float64[np.ndarray, "walks boundaries"]:
        """Differences of chosen and other experts' values over the lengths of the boundaries."""
        ahead = np.take_along_axis(values, self.inside[cell].astype(np.int64), axis=1)
        behind = np.take_along_axis(values, self.outside[cell].astype(np.int64), axis=1)
        with np.errstate(over="ignore"):  # NO_BOUNDARY times a large gap is inf, which is meant
            ratios = (ahead[:, :, None] - behind[:, None, :]) * self.inverse[cell]
        return ratios.reshape(len(cell), self.inverse[0].size)


def _walked(
    logits: Float64[np.ndarray, "cells experts"],
    cells: _Cells,
    walks: int,
    generator: np.random.Generator,
    most_balls: int,
) -> tuple[Int32[np.ndarray, "cells walks 2"], Float64[np.ndarray, "cells walks"]]:
    others = cells.outside.shape[1]
    pair = np.full((len(logits) * walks, 2), -1, dtype=np.int32)
    second = np.full(len(pair), np.nan)
    cell = np.repeat(np.arange(len(logits)), walks)
    start = cells.over_lengths(np.arange(len(logits)), logits).min(axis=1)
    first = start[cell]
    left = np.flatnonzero(first < NEVER)
    position = logits[cell[left]]
    for ball in range(most_balls + 1):
        distance = cells.over_lengths(cell[left], position)
        nearest = distance.argmin(axis=1)
        row = np.arange(len(left))
        least = distance[row, nearest]
        out = cells.inside[cell[left], nearest // others]
        into = cells.outside[cell[left], nearest % others]
        has_arrived = least <= ARRIVED * first[left]
        if has_arrived.any():
            done = left[has_arrived]
            pair[done] = np.stack([out, into], axis=1)[has_arrived]
            distance[row, nearest] = np.inf
            with np.errstate(divide="ignore", invalid="ignore"):
                second[done] = distance[has_arrived].min(axis=1) / first[done]
            distance[row, nearest] = least
        on = ~has_arrived
        if ball == most_balls or not on.any():
            break
        left, position = left[on], position[on]
        step = _step(cells, cell[left], out[on], into[on], distance[on], generator)
        position += step
    shape = (len(logits), walks)
    return pair.reshape(*shape, 2), second.reshape(shape)


def _step(
    cells: _Cells,
    cell: np.ndarray,
    out: np.ndarray,
    into: np.ndarray,
    distance: Float64[np.ndarray, "walks boundaries"],
    generator: np.random.Generator,
) -> Float64[np.ndarray, "walks experts"]:
    """Change of the logits from here to where the largest ball at the nearest boundary is left."""
    least = distance.min(axis=1)
    length = cells.moves[out] - cells.moves[into]
    normal = length / np.sqrt((length**2).sum(axis=1))[:, None]
    cosine = cells.over_lengths(
        cell, (cells.gram[out] - cells.gram[into]) / np.sqrt((length**2).sum(axis=1))[:, None]
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        room = (distance - least[:, None]) / (1.0 - cosine)
    room[1.0 - cosine <= _PARALLEL] = np.inf
    inwards = np.clip(room.min(axis=1), 0.0, _FARTHEST * least)
    line = generator.standard_normal(normal.shape)
    line /= np.sqrt((line**2).sum(axis=1))[:, None]
    return _end_of_line(line, normal, least, inwards, generator)[:, None] * (line @ cells.moves.T)


def _end_of_line(
    line: Float64[np.ndarray, "walks dims"],
    normal: Float64[np.ndarray, "walks dims"],
    depth: Float64[np.ndarray, "walks"],
    inwards: Float64[np.ndarray, "walks"],
    generator: np.random.Generator,
) -> Float64[np.ndarray, "walks"]:
    """How far along unit vectors a ball is left: ends of a line, each by the distance of the other.

    The ball has its centre ``inwards`` along ``normal`` and its surface ``depth`` the other way.
    """
    shift = inwards * (line * normal).sum(axis=1)
    product = depth * (depth + 2.0 * inwards)  # of the distances of both ends
    longer = np.abs(shift) + np.sqrt(shift**2 + product)
    shorter = product / longer
    ahead, behind = np.where(shift > 0.0, [longer, shorter], [shorter, longer])
    is_ahead = generator.random(len(line)) * (ahead + behind) < behind
    return np.where(is_ahead, ahead, -behind)
