r"""Moving router inputs: when they leave their cell, through which boundary, how long near ties.

The input moves as :math:`dx = \gamma\,dt + F\,dB` from where it is. Time has the unit in which
:math:`F F^T` is the covariance per unit of time, so that r of :mod:`moegeom.geometry.noise` is in
its root; :math:`\nu` is the same quotient of the drift, positive where it leads away. A boundary
that the noise cannot reach counts as never reached, by the drift neither.
The mean exit time through one boundary is infinite without drift and is not given.

Walks take steps so short that, but for the nearest barrier, none is crossed meanwhile; that one is
crossed as a Brownian bridge does, whose law is known.

Near ties :math:`\epsilon` is a Euclidean distance. A flat is where given n + 1 experts have one
logit, wherever the others are; the input starts at the offset m from it, in n coordinates at right
angles to it, in which noise has the covariance :math:`\Sigma_\perp` per unit of time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int32, Int64
from moegeom.geometry.boundary.barriers import Barriers
from moegeom.geometry.boundary.linear import NEVER, RowDistances
from moegeom.geometry.boundary.orders import order_distance, rows_apart
from moegeom.geometry.statistics import share_error


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
    if not sigmas.shape[1]:
        never = np.full(len(sigmas), -np.inf)
        return ExitProbability(never, never)
    log_p = np.minimum(log_crossing_probability(sigmas, time, drifts), 0.0)
    union = np.logaddexp.reduce(log_p, axis=1)
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

    nearest = sigmas.min(axis=1, initial=np.inf)
    latest = face_quantile(nearest, probability)
    earliest = latest.copy()
    row = np.flatnonzero((nearest > 0.0) & np.isfinite(nearest))

    def excess(log_time: Float64[np.ndarray, "some"], place: np.ndarray) -> np.ndarray:
        times = np.exp(log_time)[..., None]
        crossed = log_crossing_probability(
            sigmas[row[place.astype(np.int64)]] / np.sqrt(times), 1.0
        )
        return np.logaddexp.reduce(crossed, axis=-1) - np.log(probability)

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
#: Gaps of walks held at once, and the share of paths that go on down to which all are held.
_AT_ONCE, _LIVE = 2**20, 0.75


@dataclass(frozen=True, eq=False)
class ExitCurve:
    """Probability to have left the cell by each time: ``lower <= p <= upper`` in expectation.

    The errors are standard errors over the paths, of each bound on its own. ``step_error`` is how
    far the bounds move where every second time is passed over, 0 for linear rules, whose bounds are
    without bias.
    """

    times: Float64[np.ndarray, "cells times"]
    lower: Float64[np.ndarray, "cells times"]
    upper: Float64[np.ndarray, "cells times"]
    lower_error: Float64[np.ndarray, "cells times"]
    upper_error: Float64[np.ndarray, "cells times"]
    step_error: Float64[np.ndarray, "cells"]


def simulate_exit(
    logits: Float64[np.ndarray, "tokens experts"],
    barriers: Barriers,
    rows: Int64[np.ndarray, "cells"],
    times: Float64[np.ndarray, "cells times"],
    paths: int,
    generators: Sequence[np.random.Generator],
    drift: Float64[np.ndarray, "experts"] | None = None,
) -> ExitCurve:
    r"""The exit curves of inputs at increasing ``times`` > 0, from ``paths`` >= 2 paths of each.

    ``rows`` say which of the ``logits`` they are, and cells of the ``barriers``; ``drift`` is what
    a unit of time adds to the logits, :math:`W \gamma`; each input has a generator of its own, so
    that its curve is the same beside any others.
    Logits are simulated at the times alone. Between two of them, given both ends, the path crosses
    a barrier with probability :math:`e^{-2 a_0 a_1 / h}`, a its distance in deviations, whatever
    the drift, or 1 when an end is beyond; the chance to stay within all barriers is between 1 - sum
    and 1 - max of these, and factors of different steps multiply. So both bounds of a linear rule
    are unbiased however coarse the times are, and finer times bring them together; of others a is
    that of the tangent, and what the times leave is ``step_error``. 0 for k = E, 1 on a boundary.
    Source: docs/theory.md A9. Oracle in tests: closed forms for one boundary and for two, and paths
    in small steps.
    """
    cells, num_times = times.shape
    sums, coarse = np.zeros((2, 2, cells, num_times)), np.zeros((2, cells, num_times))
    rooms = [np.empty((paths, barriers.num_barriers)) for _ in range(3)]
    for n, row in enumerate(rows.tolist()):
        cell, (before, after, skipped) = np.full(paths, row), rooms
        position, last = logits[cell], 0.0
        barriers.sigmas(cell, position, before)
        skipped[:] = before
        stay, by_twos = np.ones((2, paths)), np.ones((2, paths))
        for number, step in enumerate(np.diff(times[n], prepend=0.0).tolist()):
            if number and step == 0.0:
                sums[:, :, n, number] = sums[:, :, n, number - 1]
                continue
            shape = len(cell), barriers.moves.shape[1]
            noise = generators[n].standard_normal(shape, np.float32)  # half the time of float64
            position += math.sqrt(step) * barriers.moved(cell, noise)
            if drift is not None:
                position += step * drift
            barriers.sigmas(cell, position, after)
            stay *= barriers.staying(before, after, step)
            before, after = after, before
            is_live = stay[1] > 0.0
            if not barriers.is_exact:
                if number % 2:
                    by_twos *= barriers.staying(skipped, before, step + last)
                    coarse[:, n, number] = (by_twos - stay).sum(axis=1) / paths
                    skipped[:] = before
                is_live |= by_twos[1] > 0.0
            sums[:, 0, n, number], sums[:, 1, n, number] = stay.sum(axis=1), (stay**2).sum(axis=1)
            last, on = step, np.flatnonzero(is_live)
            if len(on) <= _LIVE * len(cell):  # those that have left for certain change nothing
                cell, position, stay, by_twos = cell[on], position[on], stay[:, on], by_twos[:, on]
                before, skipped, after = before[on], skipped[on], after[: len(on)]
            if not len(on):
                break
    mean = sums[:, 0] / paths
    error = np.sqrt(np.maximum(sums[:, 1] / paths - mean**2, 0.0) / (paths - 1))
    step_error = np.abs(coarse).max(axis=(0, 2), initial=0.0)
    return ExitCurve(times, 1.0 - mean[1], 1.0 - mean[0], error[1], error[0], step_error)


# ---------------------------------------------------------------------------- walks to the boundary
#: Largest deviation of a step, in distances to the nearest barrier and to the second nearest one:
#: the nearest alone may be crossed within a step, of others the chance is 2 Phi(-4) each.
_OF_NEAREST, _OF_SECOND = 3.0, 0.25

#: Share of the first distance at which a walk has arrived.
ARRIVED = 1e-3

#: Steps of one walk at most.
MOST_STEPS = 4000


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
    barriers: Barriers,
    rows: Int64[np.ndarray, "cells"],
    walks: int,
    generator: np.random.Generator,
    most_steps: int = MOST_STEPS,
) -> Exits:
    r"""The barriers through which ``walks`` walks from some of the inputs leave their cells.

    A step has the deviation :math:`\min(3 a_{(1)}, a_{(2)} / 4)`, a the two least distances: but
    for the nearest barrier none is crossed meanwhile, up to a chance of 6e-5. That one is crossed
    with the probability :math:`e^{-2 a_0 a_1 / h}` of a bridge; where it is, the time of the first
    crossing, :math:`\tau / (h - \tau)` of inverse Gaussian law with mean :math:`a_0 / |a_1|` and
    shape :math:`a_0^2 / h`, and the bridge at that time give the place, as the law of a Brownian
    path has it. The law of the exit does not depend on the size of the noise. Exact but for that
    chance where barriers are linear, of others up to the bend within a step.
    A walk that is within 1e-3 of the first distance has arrived; on a boundary it ends at once.
    Source: docs/theory.md A9. Oracle in tests: angles of a wedge, ends of an interval, harmonic
    measure of a quadrant, and paths in small steps.
    """
    tokens = len(rows)
    pair = np.full((tokens, walks, 2), -1, dtype=np.int32)
    second = np.full((tokens, walks), np.nan)
    first = barriers.sigmas(rows, logits[rows])
    if not first.shape[1]:
        return Exits(pair, second)
    size = max(1, _AT_ONCE // (first.shape[1] * walks))
    for start in range(0, tokens, size):
        some = np.arange(start, min(start + size, tokens))
        nearest = np.repeat(first[some].min(axis=1), walks)
        cell = np.repeat(rows[some], walks)
        ends = _walked(logits, barriers, cell, nearest, generator, most_steps)
        pair[some], second[some] = (end.reshape(len(some), walks, *end.shape[1:]) for end in ends)
    return Exits(pair, second)


def _walked(
    logits: Float64[np.ndarray, "tokens experts"],
    barriers: Barriers,
    cell: Int64[np.ndarray, "walks"],
    first: Float64[np.ndarray, "walks"],
    generator: np.random.Generator,
    most_steps: int,
) -> tuple[Int32[np.ndarray, "walks 2"], Float64[np.ndarray, "walks"]]:
    pair, second = np.full((len(cell), 2), -1, dtype=np.int32), np.full(len(cell), np.nan)
    left = np.flatnonzero(first < NEVER)
    position = logits[cell[left]]
    ahead, after = np.empty((2, len(left), barriers.num_barriers))
    barriers.sigmas(cell[left], position, ahead)
    number, least, following = barriers.two_least(ahead, True)
    slot = np.arange(len(left))  # the row of ``ahead``
    for step in range(most_steps + 1):
        has_arrived = least <= ARRIVED * first[left]
        if has_arrived.any():
            done = left[has_arrived]
            pair[done] = barriers.exchange(cell[done], position[has_arrived], number[has_arrived])
            with np.errstate(divide="ignore", invalid="ignore"):
                second[done] = following[has_arrived] / first[done]
            on = ~has_arrived
            left, position, slot = left[on], position[on], slot[on]
            number, least, following = number[on], least[on], following[on]
        if step == most_steps or not len(left):
            break
        row, deviation = np.arange(len(left)), np.fmin(_OF_NEAREST * least, _OF_SECOND * following)
        deviation[np.isinf(deviation)] = 0.0  # all barriers are gone: it arrives nowhere
        noise = generator.standard_normal((len(left), barriers.moves.shape[1]))
        moved = position + deviation[:, None] * barriers.moved(cell[left], noise)
        barriers.sigmas(cell[left], moved, after[: len(left)])
        lowest, *ends = barriers.two_least(after[: len(left)], False)
        height = after[row, number]
        # another set: through the nearest barrier where it is behind or gone, else a farther one
        is_beyond = ends[0] <= 0.0
        number = np.where(is_beyond & (height > 0.0) & (height < NEVER), lowest, number)
        height = np.where(is_beyond & (height >= NEVER), -least, after[row, number])
        least = ahead[slot, number]
        with np.errstate(over="ignore", invalid="ignore"):  # inf where a set is another anyway
            chance = np.exp(-2.0 * least * np.maximum(height, 0.0) / deviation**2)
        is_out = is_beyond | (generator.random(len(left)) < chance)
        some = np.flatnonzero(is_out)
        if len(some):
            crossing = _Crossing(
                *(part[some] for part in (left, position, moved, number, least, height, deviation))
            )
            at = _place_of(barriers, cell, crossing, generator)
            done, crossed = left[some], number[some]
            pair[done] = barriers.exchange(cell[done], at, crossed)
            beside = barriers.sigmas(cell[done], at)
            beside[np.arange(len(some)), crossed] = np.inf
            second[done] = np.maximum(beside.min(axis=1), 0.0) / first[done]
        slot = np.flatnonzero(~is_out)
        left, position, number = left[slot], moved[slot], lowest[slot]
        least, following = (end[slot] for end in ends)
        ahead, after = after, ahead
    return pair, second


@dataclass(frozen=True, eq=False)
class _Crossing:
    """Walks that crossed a barrier within a step, and both ends of the step."""

    walk: Int64[np.ndarray, "some"]
    start: Float64[np.ndarray, "some experts"]
    stop: Float64[np.ndarray, "some experts"]
    barrier: Int64[np.ndarray, "some"]
    before: Float64[np.ndarray, "some"]
    after: Float64[np.ndarray, "some"]
    deviation: Float64[np.ndarray, "some"]


def _place_of(
    barriers: Barriers,
    cell: Int64[np.ndarray, "walks"],
    crossing: _Crossing,
    generator: np.random.Generator,
) -> Float64[np.ndarray, "some experts"]:
    """Where the barrier is crossed first: the bridge at that time, moved onto the barrier."""
    ours, tiny = cell[crossing.walk], np.finfo(np.float64).tiny
    before = np.fmin(crossing.before, 1.0 / tiny)
    mean = 1.0 / np.clip(np.abs(crossing.after) / before, 1e-9, 1e9)
    shape = np.clip(before / crossing.deviation, 1e-9, 1e9) ** 2
    quotient = generator.wald(mean, shape)
    share = np.clip(quotient / (1.0 + quotient), tiny, 1.0)
    noise = generator.standard_normal((len(ours), barriers.moves.shape[1]))
    spread = crossing.deviation * np.sqrt(share * (1.0 - share))
    at = crossing.start + share[:, None] * (crossing.stop - crossing.start)
    at = at + spread[:, None] * barriers.moved(ours, noise)
    row, normal = np.arange(len(ours)), barriers.normals(ours, at, crossing.barrier)
    off = barriers.sigmas(ours, at)[row, crossing.barrier]
    is_near = np.isfinite(off)
    return at - np.where(is_near, off, 0.0)[:, None] * barriers.moved(ours, normal)


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
    until = np.clip(constant ** (2.0 / order), 1e-200, horizon)  # a tube may have no width
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


@dataclass(frozen=True, eq=False)
class Ties:
    """Where experts of a router tie at the border: ``distance`` gives both ends of the distance of
    logits to the nearest boundary; ``rows`` (or their coordinates) and ``apart``, their distances,
    are those of a linear rule, None for others.
    """

    k: int
    distance: Callable[[Float64[np.ndarray, "draws experts"]], tuple[np.ndarray, np.ndarray]]
    rows: Float64[np.ndarray, "experts dims"] | None = None
    apart: RowDistances | None = None


def occupations(
    logits: Float64[np.ndarray, "experts"],
    cell: int,
    barriers: Barriers,
    ties: Ties,
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
    ``barriers`` say how noise moves the input of a ``cell``, ``drift`` is :math:`W \gamma`.
    Whatever set is chosen on the way: it is near its own border. Orders above 1 of linear rules
    alone. The error is a standard error, of at least one draw.
    Source: docs/theory.md A10 (S0 Theorem 5.3). Oracle in tests: the closed forms, and paths.
    """
    time = horizon * generator.random(draws)
    noise = generator.standard_normal((draws, barriers.moves.shape[1]))
    ours = np.full(draws, cell)
    moved = logits + np.sqrt(time)[:, None] * barriers.moved(ours, noise)
    if drift is not None:
        moved += time[:, None] * drift
    lower, upper = ties.distance(moved)
    near, undecided = lower <= width, int(((lower <= width) & (width < upper)).sum())
    by_order, searched = [], draws
    for order in sorted(set(orders)):
        if order > 1:
            if ties.rows is None or ties.apart is None:
                break
            near = near & _near_three(moved, ties.apart, near, width)
            # draws are independent: the first that are near stand for all of them, and for all
            # orders behind
            those = np.flatnonzero(near)
            if len(those) > _SEARCHED:
                searched = int(those[_SEARCHED])
                near[searched:] = False
            near, undecided = _near_order(moved, ties, near, order, width, most_nodes)
        # sets of higher order are within those of lower
        share = float(near.sum()) / searched
        error = share_error(share, searched)
        by_order.append(Occupation(order, share, error, undecided / searched))
    return by_order


#: Draws of an order that are searched for a tie of three experts and more.
_SEARCHED = 128


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
    ties: Ties,
    near: Bool[np.ndarray, "draws"],
    order: int,
    width: float,
    most_nodes: int,
) -> tuple[Bool[np.ndarray, "draws"], int]:
    """Which draws near a lower order are near this one, and of how many that is not known."""
    assert ties.rows is not None
    is_in, undecided, apart = np.zeros(len(near), dtype=bool), 0, rows_apart(ties.rows)
    for draw in np.flatnonzero(near).tolist():
        bracket = order_distance(logits[draw], ties.rows, ties.k, order, most_nodes, apart, width)
        is_in[draw] = bracket.lower <= width
        undecided += bracket.lower <= width < bracket.upper
    return is_in, undecided
