r"""Moving router inputs: when they leave their cell, and through which boundary.

The input moves as :math:`dx = \gamma\,dt + F\,dB` from where it is. Time has the unit in which
:math:`F F^T` is the covariance per unit of time, so that r of :mod:`moegeom.geometry.noise` is in
its root; :math:`\nu` is the same quotient of the drift, positive where it leads away. A boundary
that the noise cannot reach counts as never reached, by the drift neither.
The mean exit time through one boundary is infinite without drift and is not given.

Walks take steps so short that, but for the nearest barrier, none is crossed meanwhile; that one is
crossed as a Brownian bridge does, whose law is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float64, Int32, Int64
from moegeom.geometry.boundary.barriers import Barriers
from moegeom.geometry.boundary.linear import NEVER


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
