r"""When a diffusing router input first leaves its cell: bounds, and quantiles.

The input moves as :math:`dx = F\,dB` from where it is. Time has the unit in which :math:`F F^T` is
the covariance per unit of time, so that r of :mod:`moegeom.geometry.noise.boundary_sigmas` is in
its root. The mean exit time through one boundary is infinite and is not given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64


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
    sigmas: Float64[np.ndarray, "*shape"], time: float
) -> Float64[np.ndarray, "*shape"]:
    r"""Logarithm of :math:`p(r, t) = 2 (1 - \Phi(r / \sqrt t))`: one boundary is crossed by time t.

    0 (certain) on the boundary, even at time 0; -inf at infinite r, and at time 0 off the boundary.
    Source: docs/theory.md A9 (S0 Theorem 5.1, reflection). Oracle in tests: mpmath's erfc.
    """
    from scipy.special import log_ndtr

    if time == 0.0:
        return np.where(sigmas == 0.0, 0.0, -np.inf)
    return np.log(2.0) + log_ndtr(-sigmas / np.sqrt(time))


def exit_probability(
    sigmas: Float64[np.ndarray, "tokens boundaries"],
    time: float,
    is_positive: Bool[np.ndarray, "tokens"] | None = None,
) -> ExitProbability:
    r"""Bounds on the probability that the chosen set has changed at some time up to ``time``.

    Below: the nearest boundary alone, :math:`p(r_{\min}, t)`. Above: the union,
    :math:`\min(1, \sum p(r_{ij}, t))`, or where ``is_positive`` (from
    :func:`~moegeom.geometry.noise.boundary_sigmas.are_boundaries_positive`) says that it holds,
    Slepian's
    :math:`1 - \prod (1 - p(r_{ij}, t))`, which is never larger. Both 0 without boundaries (k = E),
    both 1 on a boundary. Source: docs/theory.md A9. Oracle in tests: simulation.
    """
    from scipy.special import logsumexp

    if not sigmas.shape[1]:
        never = np.full(len(sigmas), -np.inf)
        return ExitProbability(never, never)
    log_p = np.minimum(log_crossing_probability(sigmas, time), 0.0)
    union = np.minimum(logsumexp(log_p, axis=1), 0.0)
    lower = log_p.max(axis=1)
    if is_positive is None or not is_positive.any():
        return ExitProbability(lower, union)
    with np.errstate(divide="ignore"):
        log_stay = np.log1p(-np.exp(log_p)).sum(axis=1)
        slepian = np.log(-np.expm1(log_stay))
    # where every p is tiny the sum is the product, and does not underflow
    tiny = log_stay > -1e-12
    sharper = np.where(is_positive & ~tiny, np.clip(slepian, lower, union), union)
    return ExitProbability(lower, sharper)


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
        found = find_root(excess, ends, args=(place,), tolerances={"xatol": 1e-11})
        earliest[row] = np.exp(np.minimum(found.x, late))
    return earliest, latest
