r"""When a moving router input leaves its cell: bounds, quantiles and a simulation.

The input moves as :math:`dx = \gamma\,dt + F\,dB` from where it is. Time has the unit in which
:math:`F F^T` is the covariance per unit of time, so that r of :mod:`moegeom.geometry.noise` is in
its root; :math:`\nu` is the same quotient of the drift, positive where it leads away. A boundary
that the noise cannot reach counts as never reached, by the drift neither.
The mean exit time through one boundary is infinite without drift and is not given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float64, Int32
from moegeom.geometry.boundary.linear import RowDistances
from moegeom.geometry.boundary.order_distance import row_coordinates
from moegeom.geometry.noise import boundary_sigmas


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
    return ExitProbability(log_p.max(axis=1), np.minimum(logsumexp(log_p, axis=1), 0.0))


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
