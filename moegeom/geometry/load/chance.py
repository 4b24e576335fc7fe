"""What even routing shows on these documents by chance: limits for loads, and for a reduction.

Documents (or runs of tokens, where none are known) are the sampling unit. Everything is derived
from how the counts of the units scatter, so that dependence between the tokens of one document is
in it; docs/theory.md D3 has the floors for independent tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64
from scipy.stats import t as student_t

#: Units are bundled to as many at most; bundles of independent units are independent.
_MOST_UNITS = 256

#: Draws behind a limit at least, and draws beyond the limit at least.
_DRAWS, _BEYOND = 4000, 20

_AT_ONCE = 1000


def unit_counts(
    chosen: Bool[np.ndarray, "tokens experts"], unit: Int64[np.ndarray, "tokens"]
) -> Int64[np.ndarray, "units experts"]:
    """Tokens of each unit that choose each expert; units in order of their number, bundled."""
    _, number = np.unique(unit, return_inverse=True)
    number = number.astype(np.int64) % _MOST_UNITS
    counts = np.zeros((int(number.max(initial=-1)) + 1, chosen.shape[1]), dtype=np.int64)
    np.add.at(counts, number, chosen.astype(np.int64))
    return counts


@dataclass(frozen=True, eq=False)
class Scatter:
    """How the loads of some tokens came about, unit by unit.

    ``load`` is in fair shares. ``residual`` [units experts] sums to 0 over units, and the sum over
    a random draw of units estimates what other documents would have shown: the load is a ratio of
    two sums, linearised.
    """

    load: Float64[np.ndarray, "experts"]
    residual: Float64[np.ndarray, "units experts"]

    @property
    def num_units(self) -> int:
        return len(self.residual)

    @property
    def noise_squared(self) -> float:
        """Mean over experts of the squared standard error of the load; inf for one unit."""
        units = self.num_units
        if units < 2:
            return math.inf
        return float((self.residual**2).sum(axis=0).mean()) * units / (units - 1)


def scatter(counts: Int64[np.ndarray, "units experts"]) -> Scatter:
    """Load and residuals of counts by unit; at least one slot must have been chosen."""
    slots = counts.sum(axis=1, keepdims=True)
    fair = counts.sum() / counts.shape[1]
    load = counts.sum(axis=0) / fair
    residual = (counts - load * slots / counts.shape[1]) / fair
    return Scatter(load, residual)


def max_vio_limit(parts: Sequence[Scatter], level: float, seed: int = 0) -> float:
    r"""MaxVio that even routing stays below with probability 1 - ``level``, on such documents.

    The largest over experts of :math:`\sum_p \delta_p`, where :math:`\delta_p` is multivariate t
    with the covariance of the unit residuals of part p and one degree of freedom less than it has
    units. One part for loads as they are; two for a bias that was made on other documents, whose
    own chance it carries along. inf when a part has one unit. Oracle in tests: Monte Carlo.
    """
    if any(part.num_units < 2 for part in parts):
        return math.inf
    draws = max(_DRAWS, math.ceil(_BEYOND / level))
    generator = np.random.Generator(np.random.PCG64([seed, draws]))
    largest = np.empty(draws)
    for start in range(0, draws, _AT_ONCE):
        size = min(_AT_ONCE, draws - start)
        total = np.zeros((size, len(parts[0].load)))
        for part in parts:
            units = part.num_units
            scale = np.sqrt(units / generator.chisquare(units - 1, size))
            total += scale[:, None] * (generator.standard_normal((size, units)) @ part.residual)
        largest[start : start + size] = total.max(axis=1)
    return float(np.quantile(largest, 1.0 - level))


def cv_squared_reduction(before: Scatter, after: Scatter) -> tuple[float, float]:
    """By how much the squared CV of the expected load fell, and the probability of that by chance.

    Both on the same units. The squared CV that noise adds is subtracted on each side; the standard
    error comes from the units (first order), the probability from Student's t with one degree of
    freedom less than there are units. (nan, 1) for fewer than two units. Oracle: Monte Carlo.
    """
    units = before.num_units
    if units < 2:
        return math.nan, 1.0
    first, second = before.load - 1.0, after.load - 1.0
    fell = float((first**2).mean() - (second**2).mean())
    fell -= before.noise_squared - after.noise_squared
    share = 2.0 * (before.residual * first - after.residual * second).mean(axis=1)
    error = math.sqrt(float((share**2).sum()) * units / (units - 1))
    if error == 0.0:
        return fell, 0.0 if fell > 0.0 else 1.0
    return fell, float(student_t.sf(fell / error, units - 1))
