"""When a diffusing router input leaves its cell, simulated: a bracket without bias in time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int32

from moegeom.geometry.boundary.linear import RowDistances
from moegeom.geometry.boundary.order_distance import row_coordinates
from moegeom.geometry.noise.boundary_sigmas import boundary_sigmas

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
) -> ExitCurve:
    r"""The exit curve of one input at increasing ``times`` > 0, from ``paths`` >= 2 paths.

    ``rows`` are those of :func:`~moegeom.geometry.noise.boundary_sigmas.noisy_rows` and
    ``distances`` theirs. Logits are simulated at the times alone. Between two of them, given both
    ends, the path crosses a boundary with probability :math:`e^{-2 a_0 a_1 / h}`, a the gap over
    its standard deviation, or 1 when an end is beyond; the chance to stay within all boundaries is
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


def quantile_interval(
    curve: ExitCurve, probability: float, deviations: float = 3.0
) -> tuple[float, float]:
    """Times between which the cell is left with ``probability``, as an interval.

    From the last time before the upper bound could have reached it to the first by which the lower
    bound must have, each moved by ``deviations`` standard errors; 0 and inf stand for before the
    first and after the last time.
    """
    could = np.flatnonzero(curve.upper + deviations * curve.upper_error >= probability)
    must = np.flatnonzero(curve.lower - deviations * curve.lower_error >= probability)
    first = int(could[0]) if could.size else len(curve.times)
    earliest = float(curve.times[first - 1]) if first else 0.0
    return earliest, float(curve.times[must[0]]) if must.size else np.inf


def _crossing(
    before: Float64[np.ndarray, "paths boundaries"],
    after: Float64[np.ndarray, "paths boundaries"],
    step: float,
) -> Float64[np.ndarray, "paths boundaries"]:
    """Probability that a Brownian bridge between the two gaps reaches 0."""
    with np.errstate(invalid="ignore", over="ignore"):  # what is beyond is replaced below
        crossing = np.exp(-2.0 * before * after / step)
    return np.where((before <= 0.0) | (after <= 0.0), 1.0, crossing)
