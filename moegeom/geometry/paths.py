r"""Moving router inputs: when they leave their cell, through which boundary, how long near ties.

The input moves as :math:`dx = \gamma\,dt + F\,dB` from where it is. Time has the unit in which
:math:`F F^T` is the covariance per unit of time, so that r of :mod:`moegeom.geometry.noise` is in
its root; :math:`\nu` is the same quotient of the drift, positive where it leads away. A boundary
that the noise cannot reach counts as never reached, by the drift neither.
The mean exit time through one boundary is infinite without drift and is not given.

Walks never meet time: without drift and in coordinates where F is the unit matrix an input leaves a
ball through a point whose law is known, so it is moved from ball to ball. Only distances to
boundaries are computed, no step of time is chosen, and the law of the exit has no bias but the
width at which a walk counts as having arrived.

Near ties :math:`\epsilon` is a Euclidean distance. A flat is where given n + 1 experts have one
logit, wherever the others are; the input starts at the offset m from it, in n coordinates at right
angles to it, in which noise has the covariance :math:`\Sigma_\perp` per unit of time.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int32, Int64
from moegeom.geometry.boundary.linear import NEVER, RowDistances
from moegeom.geometry.boundary.orders import order_distance, row_coordinates
from moegeom.geometry.noise import boundary_sigmas
from moegeom.geometry.selection import top_k
from moegeom.geometry.set_code import chosen_mask


# ------------------------------------------------------------------------------------------- bounds
@dataclass(frozen=True, eq=False)
class ExitProbability:
    """Bounds on the probability to have left the cell, as natural logarithms: none underflows."""

    log_lower: Float64[np.ndarray, "tokens"]
    log_upper: Float64[np.ndarray, "tokens"]

    @property
    def lower(self) -> Float64[np.ndarray, "tokens"]:
        """Lower bound, between 0 and 1."""
        return np.exp(self.log_lower)

    @property
    def upper(self) -> Float64[np.ndarray, "tokens"]:
        """Upper bound, between 0 and 1."""
        return np.exp(self.log_upper)


def log_crossing_probability(
    sigmas: Float64[np.ndarray, "*shape"],
    time: float,
    drifts: Float64[np.ndarray, "*shape"] | None = None,
) -> Float64[np.ndarray, "*shape"]:
    r"""Logarithm of the probability that one boundary is crossed by time t.

    :math:`p(r, t) = 2 (1 - \Phi(r / \sqrt t))` without drift, and with it

    .. math:: p = \Phi(-(r + \nu t) / \sqrt t) + e^{-2 \nu r} \Phi((-r + \nu t) / \sqrt t)

    0 (certain) on the boundary, even at time 0; -inf at infinite r, and at time 0 off the boundary.
    Source: docs/theory.md A9 (S0 Theorem 5.1, reflection). Oracle in tests: mpmath's erfc, and
    quadrature of the density of the crossing time.
    """
    from scipy.special import log_ndtr

    if time == 0.0:
        return np.where(sigmas == 0.0, 0.0, -np.inf)
    root = np.sqrt(time)
    if drifts is None:
        return np.log(2.0) + log_ndtr(-sigmas / root)
    r, nu = np.where(np.isinf(sigmas), 0.0, sigmas), np.where(np.isinf(sigmas), 0.0, drifts)
    ahead = log_ndtr(-(r + nu * time) / root)
    back = log_ndtr((nu * time - r) / root) - 2.0 * nu * r
    return np.where(np.isinf(sigmas), -np.inf, np.logaddexp(ahead, back))


def exit_probability(
    sigmas: Float64[np.ndarray, "tokens boundaries"],
    time: float,
    drifts: Float64[np.ndarray, "tokens boundaries"] | None = None,
) -> ExitProbability:
    r"""Bounds on the probability that the chosen set has changed at some time up to ``time``.

    Below: the likeliest boundary alone, without drift the nearest, :math:`p(r_{\min}, t)`. Above:
    the union, :math:`\min(1, \sum p(r_{ij}, t))`. Both 0 without boundaries (k = E), both 1 on a
    boundary. Source: docs/theory.md A9. Oracle in tests: simulation.
    """
    from scipy.special import logsumexp

    if not sigmas.shape[1]:
        never = np.full(len(sigmas), -np.inf)
        return ExitProbability(never, never)
    log_p = np.minimum(log_crossing_probability(sigmas, time, drifts), 0.0)
    union = np.asarray(logsumexp(log_p, axis=1))
    return ExitProbability(log_p.max(axis=1), np.minimum(union, 0.0))


def face_quantile(
    sigmas: Float64[np.ndarray, "*shape"], probability: float
) -> Float64[np.ndarray, "*shape"]:
    r"""Time by which one boundary is crossed with ``probability`` p.

    .. math:: t_p = (r / \Phi^{-1}(1 - p / 2))^2

    With the nearest boundary, an upper bound on the time by which the cell is left with probability
    p: other boundaries make it sooner. p is the probability to have left; S0's delta is 1 - p. 0 on
    the boundary, inf for p = 1 off it and at infinite r. Source: docs/theory.md A9 (S0 Proposition
    A.21). Oracle in tests: scipy.stats.levy.
    """
    from scipy.special import ndtri

    with np.errstate(divide="ignore", invalid="ignore"):
        times = (sigmas / ndtri(probability / 2.0)) ** 2
    return np.where(sigmas == 0.0, 0.0, times)


def cell_quantiles(
    sigmas: Float64[np.ndarray, "tokens boundaries"], probability: float
) -> tuple[Float64[np.ndarray, "tokens"], Float64[np.ndarray, "tokens"]]:
    r"""Bounds on the times by which cells are left with ``probability``, 0 < p < 1.

    From where the union reaches p (:math:`\sum p(r_{ij}, t) = p`) to the quantile of the nearest
    boundary. Both 0 on a boundary; both inf without boundaries in reach. Relative error 1e-9.
    Source: docs/theory.md A9. Oracle in tests: simulation.
    """
    from scipy.optimize.elementwise import find_root
    from scipy.special import logsumexp

    nearest = sigmas.min(axis=1, initial=np.inf)
    latest = face_quantile(nearest, probability)
    earliest = latest.copy()
    row = np.flatnonzero((nearest > 0.0) & np.isfinite(nearest))

    def excess(log_time: Float64[np.ndarray, "some"], place: np.ndarray) -> np.ndarray:
        times = np.exp(log_time)[..., None]
        crossed = log_crossing_probability(
            sigmas[row[place.astype(np.int64)]] / np.sqrt(times), 1.0
        )
        return logsumexp(crossed, axis=-1) - np.log(probability)

    if len(row):
        place = np.arange(len(row), dtype=np.float64)
        late = np.log(latest[row])
        # each of n boundaries alone reaches p / n before their sum reaches p
        soon = np.log(face_quantile(nearest[row], probability / sigmas.shape[1])) - 1e-9
        # one boundary that counts alone has its root at the end of the bracket
        ends = (soon, late + 1e-9)
        root = find_root(excess, ends, args=(place,), tolerances={"xatol": 1e-11})
        earliest[row] = np.exp(np.minimum(root.x, late))
    return earliest, latest


# --------------------------------------------------------------------------------------- simulation
#: Gaps held at once.
_AT_ONCE = 2**20


@dataclass(frozen=True, eq=False)
class ExitCurve:
    """Probability to have left the cell by each time: ``lower <= p <= upper`` in expectation.

    The errors are standard errors over the paths, of each bound on its own.
    """

    times: Float64[np.ndarray, "times"]
    lower: Float64[np.ndarray, "times"]
    upper: Float64[np.ndarray, "times"]
    lower_error: Float64[np.ndarray, "times"]
    upper_error: Float64[np.ndarray, "times"]


def simulate_exit(
    logits: Float64[np.ndarray, "experts"],
    chosen: Int32[np.ndarray, "k"],
    rows: Float64[np.ndarray, "experts noises"],
    distances: RowDistances,
    times: Float64[np.ndarray, "times"],
    paths: int,
    generator: np.random.Generator,
    drift: Float64[np.ndarray, "experts"] | None = None,
) -> ExitCurve:
    r"""The exit curve of one input at increasing ``times`` > 0, from ``paths`` >= 2 paths.

    ``rows`` are those of :func:`~moegeom.geometry.noise.noisy_rows` and ``distances``
    theirs; ``drift`` is what a unit of time adds to the logits, :math:`W \gamma`.
    Logits are simulated at the times alone. Between two of them, given both ends, the path crosses
    a boundary with probability :math:`e^{-2 a_0 a_1 / h}`, a the gap over its standard deviation,
    whatever the drift, or 1 when an end is beyond; the chance to stay within all boundaries is
    between 1 - sum and 1 - max of these, and factors of different steps multiply. So both bounds
    are unbiased however coarse the times are, and finer times bring them together. 0 for k = E, 1
    on a boundary. Source: docs/theory.md A9. Oracle in tests: closed forms for one boundary and for
    two, and paths in small steps.
    """
    moves = row_coordinates(rows)
    num_boundaries = len(chosen) * (len(logits) - len(chosen))
    steps = np.diff(times, prepend=0.0)
    # sums over paths of stay and stay squared, for the lower and the upper chance to stay
    sums = np.zeros((2, 2, len(times)))
    size = max(1, _AT_ONCE // max(num_boundaries, 1))
    for start in range(0, paths, size):
        count = min(size, paths - start)
        position = np.tile(logits, (count, 1))
        inside = np.tile(chosen, (count, 1))
        stay = np.ones((2, count))
        before = boundary_sigmas(position, inside, distances)
        for number, step in enumerate(steps):
            noise = generator.standard_normal((count, moves.shape[1]))
            position += np.sqrt(step) * (noise @ moves.T)
            if drift is not None:
                position += step * drift
            after = boundary_sigmas(position, inside, distances)
            crossing = _crossing(before, after, float(step))
            stay[0] *= np.maximum(1.0 - crossing.sum(axis=1), 0.0)
            stay[1] *= 1.0 - crossing.max(axis=1, initial=0.0)
            sums[:, 0, number] += stay.sum(axis=1)
            sums[:, 1, number] += (stay**2).sum(axis=1)
            before = after
    mean = sums[:, 0] / paths
    variance = np.maximum(sums[:, 1] / paths - mean**2, 0.0)
    error = np.sqrt(variance / (paths - 1))
    return ExitCurve(times, 1.0 - mean[1], 1.0 - mean[0], error[1], error[0])


def _crossing(
    before: Float64[np.ndarray, "paths boundaries"],
    after: Float64[np.ndarray, "paths boundaries"],
    step: float,
) -> Float64[np.ndarray, "paths boundaries"]:
    """Probability that a Brownian bridge between the two gaps reaches 0."""
    with np.errstate(invalid="ignore", over="ignore"):  # what is beyond is replaced below
        crossing = np.exp(-2.0 * before * after / step)
    return np.where((before <= 0.0) | (after <= 0.0), 1.0, crossing)


# ---------------------------------------------------------------------------- walks to the boundary
#: Share of the first distance at which a walk has arrived.
ARRIVED = 1e-6

#: Largest distance of a ball's centre from the walk, in distances to the nearest boundary: where
#: there is one boundary only, a ball of this size stands for its half-space.
_FARTHEST = 1e9

#: Balls of one walk at most; walks of 256 experts take a tenth of it.
MOST_BALLS = 20_000

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
        outside = np.nonzero(~chosen_mask(chosen, len(moves)))[1]
        outside = outside.reshape(len(chosen), -1).astype(np.int32)
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


# ----------------------------------------------------------------------------------- time near ties
# -------------------------------------------------------------------------------------- single flat
def occupation_integral(
    order: int, exponent: Float64[np.ndarray, "*shape"], horizon: float
) -> Float64[np.ndarray, "*shape"]:
    r"""The integral :math:`I_n(b, T) = \int_0^T t^{-n/2} e^{-b/t} dt` for b > 0.

    .. math:: I_1 = 2 \sqrt T e^{-b/T} - 2 \sqrt{\pi b}\, \mathrm{erfc} \sqrt{b/T}, \quad
              I_2 = E_1(b/T), \quad I_n = b^{1-n/2}\, \Gamma(n/2 - 1, b/T)

    The published I_1 lacks its exponential (F-11). At b = 0 that of n = 1 is :math:`2 \sqrt T`, the
    others are infinite. Source: docs/theory.md A10 (S0 Theorem 5.3). Oracle in tests: quadrature.
    """
    from scipy.special import erfc, exp1, gamma, gammaincc

    ratio = exponent / horizon
    if order == 1:
        root = 2.0 * math.sqrt(horizon) * np.exp(-ratio)
        return root - 2.0 * np.sqrt(np.pi * exponent) * erfc(np.sqrt(ratio))
    if order == 2:
        return exp1(ratio)
    half = order / 2.0 - 1.0
    with np.errstate(divide="ignore"):
        return exponent**-half * gamma(half) * gammaincc(half, ratio)


def capped_occupation(
    order: int, constant: Float64[np.ndarray, "*shape"], horizon: float
) -> Float64[np.ndarray, "*shape"]:
    r""":math:`\int_0^T \min(1, c\, t^{-n/2}) dt`: the bound for an input on the flat's tube, b = 0.

    With :math:`t_0 = c^{2/n}`: T up to t_0, then :math:`t_0 (1 + \ln(T/t_0))` for n = 2 and
    :math:`t_0 + c\, (T^{1-n/2} - t_0^{1-n/2}) / (1 - n/2)` for others. Finite for every n, where
    the published bound is not (F-11). Source: docs/theory.md A10. Oracle in tests: quadrature.
    """
    until = np.minimum(constant ** (2.0 / order), horizon)
    if order == 2:
        return until * (1.0 + np.log(horizon / until))
    power = 1.0 - order / 2.0
    return until + constant * (horizon**power - until**power) / power


def occupation_bound(
    order: int,
    sigmas: Float64[np.ndarray, "flats"],
    volume: Float64[np.ndarray, "flats"],
    width: float,
    horizon: float,
) -> Float64[np.ndarray, "flats"]:
    r"""Bound on the mean time within ``width`` of each flat, at most T.

    :math:`K_n \epsilon^n I_n(b, T)` with :math:`K_n = \omega_n / ((2 \pi)^{n/2} v)` and
    :math:`b = \delta_\epsilon^2 / 2`: ``sigmas`` are standard deviations to the nearest point of
    the tube, ``volume`` is :math:`v = \sqrt{\det \Sigma_\perp}`; where the tube is reached at once,
    :func:`capped_occupation`. For paths without drift. Source: docs/theory.md A10 (S0 Theorem 5.3).
    Oracle in tests: the closed form of :func:`slab_occupation`, and the exact time in a tube.
    """
    unit_ball = math.pi ** (order / 2.0) / math.gamma(order / 2.0 + 1.0)
    constant = unit_ball * width**order / ((2.0 * math.pi) ** (order / 2.0) * volume)
    is_off = sigmas > 0.0
    bound = capped_occupation(order, constant, horizon)
    away = constant[is_off] * occupation_integral(order, sigmas[is_off] ** 2 / 2.0, horizon)
    bound[is_off] = np.minimum(away, bound[is_off])
    return np.minimum(bound, horizon)


def slab_occupation(
    sigmas: Float64[np.ndarray, "*shape"], width: Float64[np.ndarray, "*shape"], horizon: float
) -> Float64[np.ndarray, "*shape"]:
    r"""Exact mean time within a slab: both sides of one boundary at ``sigmas`` m, half ``width`` e.

    :math:`J(e - m) - J(-e - m)` in standard deviations, J the mean time below a level,
    :math:`J(a) = T \Phi(s) + |a| \sqrt T \varphi(s) - a^2 \Phi(-s)` with
    :math:`s = |a| / \sqrt T` for a > 0, T less that of -a for a < 0, and T / 2 at 0. 0 at infinite
    m; absolute error 1e-15 T. Source: docs/theory.md A10. Oracle in tests: quadrature.
    """
    time = _time_below(width - sigmas, horizon) - _time_below(-width - sigmas, horizon)
    return np.where(np.isinf(sigmas), 0.0, np.maximum(time, 0.0))


def _time_below(
    level: Float64[np.ndarray, "*shape"], horizon: float
) -> Float64[np.ndarray, "*shape"]:
    """Mean time, up to the horizon, of standard Brownian motion from 0 below a level."""
    from scipy.special import ndtr

    root = math.sqrt(horizon)
    s = np.where(np.isinf(level), 0.0, np.abs(level)) / root
    density = np.exp(-0.5 * s * s) / math.sqrt(2.0 * math.pi)
    above = horizon * (ndtr(s) + s * density - s * s * ndtr(-s))
    return np.where(level >= 0.0, above, horizon - above)


@dataclass(frozen=True, eq=False)
class Flats:
    """All flats of one order: the experts that tie, and the inverse products of row differences."""

    tied: Int64[np.ndarray, "flats experts"]
    inverse: Float64[np.ndarray, "flats n n"]


def flats_of(rows: Float64[np.ndarray, "experts hidden"], order: int) -> Flats:
    """The C(E, n + 1) flats of n + 1 = ``order`` + 1 experts; dependent rows by the pseudo-inverse,
    whose distances are those to where the tie is nearest to being one.
    """
    choices = itertools.combinations(range(len(rows)), order + 1)
    tied = np.array(list(choices), dtype=np.int64).reshape(-1, order + 1)
    gram = rows @ rows.T
    first, rest = tied[:, :1], tied[:, 1:]
    products = gram[rest[:, :, None], rest[:, None, :]] + gram[first, first][:, :, None]
    products -= gram[first, rest][:, None, :] + gram[first, rest][:, :, None]
    return Flats(tied, np.linalg.pinv(products, hermitian=True))


def union_bound(
    logits: Float64[np.ndarray, "experts"],
    flats: Flats,
    width: float,
    horizon: float,
    scale: float = 1.0,
) -> float:
    r"""Sum over all flats of the bounds on the time near each, at most T: valid, and loose.

    :func:`slab_occupation` for n = 1, :func:`occupation_bound` for others, at the distances
    :math:`\sqrt{d^T (C C^T)^{-1} d}` of A4, for isotropic noise of standard deviation ``scale`` a
    coordinate per unit of time and no drift. Before it is cut off at T it may grow with n (F-11).
    Source: docs/theory.md A10. Oracle in tests: the flats one by one.
    """
    gaps = logits[flats.tied[:, 1:]] - logits[flats.tied[:, :1]]
    squares = np.einsum("fi,fij,fj->f", gaps, flats.inverse, gaps)
    distance, order = np.sqrt(np.maximum(squares, 0.0)), gaps.shape[1]
    if order == 1:
        widths = np.full(len(distance), width / scale)
        bounds = slab_occupation(distance / scale, widths, horizon)
    else:
        sigmas = np.maximum(distance - width, 0.0) / scale
        volume = np.full(len(distance), scale**order)
        bounds = occupation_bound(order, sigmas, volume, width, horizon)
    return min(float(bounds.sum()), horizon)


# -------------------------------------------------------------------------------- all flats at once
@dataclass(frozen=True)
class Occupation:
    """Share of the time near a tie of ``order`` + 1 experts at the border, over some draws.

    ``undecided`` is the share of draws of which a search did not find out; they are counted in.
    """

    order: int
    share: float
    error: float
    undecided: float


def occupations(
    logits: Float64[np.ndarray, "experts"],
    rows: Float64[np.ndarray, "experts hidden"],
    noise: Float64[np.ndarray, "experts noises"],
    distances: RowDistances,
    k: int,
    orders: tuple[int, ...],
    width: float,
    horizon: float,
    draws: int,
    generator: np.random.Generator,
    drift: Float64[np.ndarray, "experts"] | None = None,
    most_nodes: int = 1000,
) -> list[Occupation]:
    r"""Share of the time within ``width`` of the closed set of each order, ascending, without bias.

    :math:`E[A] / T = P(x_U \in T_\epsilon(\Gamma^{(n)}))` with U uniform on [0, T] and
    :math:`x_U \sim N(x_0 + \gamma U, U F F^T)`: one normal number a draw and coordinate, no path.
    ``rows`` are router rows or their :func:`row_coordinates`, ``distances`` theirs, ``noise`` those
    of :func:`~moegeom.geometry.noise.noisy_rows`, ``drift`` is :math:`W \gamma`. Whatever set is
    chosen on the way: it is near its own border. The error is a standard error, of at least one
    draw. Source: docs/theory.md A10 (S0 Theorem 5.3). Oracle in tests: the closed forms, and paths.
    """
    time = horizon * generator.random(draws)
    moves = row_coordinates(noise)
    spread = np.sqrt(time)[:, None] * generator.standard_normal((draws, moves.shape[1]))
    moved = logits + spread @ moves.T
    if drift is not None:
        moved += time[:, None] * drift
    chosen = top_k(moved, k)
    near = boundary_sigmas(moved, chosen, distances).min(axis=1, initial=np.inf) <= width
    by_order = []
    for order in sorted(set(orders)):
        if order == 1:
            is_in, undecided = near, 0
        else:
            near = near & _near_three(moved, distances, near, width)
            is_in, undecided = _near_order(moved, rows, near, k, order, width, most_nodes)
        near = is_in  # sets of higher order are within those of lower
        share = float(is_in.mean())
        # a share of none or all of the draws is known no better than to one of them
        spread_of_one = max(share * (1.0 - share), (1.0 - 1.0 / draws) / draws)
        error = math.sqrt(spread_of_one / draws)
        by_order.append(Occupation(order, share, error, undecided / draws))
    return by_order


def _near_three(
    logits: Float64[np.ndarray, "draws experts"],
    distances: RowDistances,
    near: Bool[np.ndarray, "draws"],
    width: float,
) -> Bool[np.ndarray, "draws"]:
    """Of the draws that are near, those where some three experts nearly tie two by two: else no
    tie of three or more is as near.
    """
    is_near = np.zeros(len(near), dtype=bool)
    for draw in np.flatnonzero(near).tolist():
        with np.errstate(over="ignore"):
            apart = np.abs(logits[draw][:, None] - logits[draw]) * distances.inverse
        pairs = (apart <= width) & ~np.eye(len(apart), dtype=bool)
        some = pairs.sum(axis=1) > 1
        links = pairs[np.ix_(some, some)].astype(np.float32)
        is_near[draw] = bool((links * (links @ links)).any())
    return is_near


def _near_order(
    logits: Float64[np.ndarray, "draws experts"],
    rows: Float64[np.ndarray, "experts dims"],
    near: Bool[np.ndarray, "draws"],
    k: int,
    order: int,
    width: float,
    most_nodes: int,
) -> tuple[Bool[np.ndarray, "draws"], int]:
    """Which draws near a lower order are near this one, and of how many that is not known."""
    is_in, undecided = np.zeros(len(near), dtype=bool), 0
    for draw in np.flatnonzero(near).tolist():
        bracket = order_distance(logits[draw], rows, k, order, most_nodes)
        is_in[draw] = bracket.lower <= width
        undecided += bracket.lower <= width < bracket.upper
    return is_in, undecided
