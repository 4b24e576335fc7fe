r"""Series of states over steps: alternation, return, and agreement of two series.

Every p-value here is one of permutations: what it needs is that under the null hypothesis the order
of the steps, or the numbering of the experts, says nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64, Int64
from moegeom.geometry.statistics import jackknife_error


# ------------------------------------------------------------------------------------------- change
def changes(
    states: Sequence[Float[np.ndarray, "experts width"]], digests: Sequence[str]
) -> Float64[np.ndarray, "intervals"]:
    r"""Relative change of a matrix from each step to the next, :math:`|W_t - W_{t-1}| / |W_{t-1}|`.

    Frobenius norms, no unit. 0 where the digests are the same, whatever the matrices are; inf for
    a matrix that was zero and no longer is.
    """
    relative = np.zeros(max(len(states) - 1, 0))
    for index in range(len(relative)):
        if not digests[index] or digests[index] != digests[index + 1]:
            before, after = (states[i].astype(np.float64) for i in (index, index + 1))
            moved, length = float(np.linalg.norm(after - before)), float(np.linalg.norm(before))
            relative[index] = moved / length if length > 0.0 else math.inf if moved else 0.0
    return relative


# -------------------------------------------------------------------------------------- alternation
def main_scores(states: Float[np.ndarray, "steps dims"]) -> Float64[np.ndarray, "steps"]:
    """Scores of the states along the direction in which they differ most, their mean taken out.

    Unit of the states. Reordering the steps reorders the scores, so that a permutation test of the
    scores is one of the states. The sign is that of no state in particular; 0 for equal states.
    """
    centred = states.astype(np.float64) - states.mean(axis=0, dtype=np.float64)
    left, size, _ = np.linalg.svd(centred, full_matrices=False)
    return left[:, 0] * size[0]


def alternation_p_value(is_above: Bool[np.ndarray, "steps"]) -> float:
    r"""Probability of as many runs or more, when every order of the signs is as likely.

    With n of one sign and m of the other, :math:`P(R = 2i) = 2 \binom{n-1}{i-1} \binom{m-1}{i-1}
    / \binom{n+m}{n}` and :math:`P(R = 2i + 1) = [\binom{n-1}{i} \binom{m-1}{i-1} + \binom{n-1}{i-1}
    \binom{m-1}{i}] / \binom{n+m}{n}`. 1 where all signs are equal. A trend, or a memory that keeps
    neighbours alike, makes fewer runs: the test then errs on the cautious side.
    Source: Wald and Wolfowitz 1940. Oracle in tests: all orders, one by one.
    """
    n, m = int(is_above.sum()), int((~is_above).sum())
    if not n or not m:
        return 1.0
    runs = 1 + int((is_above[1:] != is_above[:-1]).sum())
    ways = 0
    for number in range(runs, n + m + 1):
        half = number // 2
        if number % 2:
            ways += math.comb(n - 1, half) * math.comb(m - 1, half - 1)
            ways += math.comb(n - 1, half - 1) * math.comb(m - 1, half)
        else:
            ways += 2 * math.comb(n - 1, half - 1) * math.comb(m - 1, half - 1)
    return ways / math.comb(n + m, n)


def least_alternation_p_value(steps: int) -> float:
    """The p-value of steps that alternate without an exception: no series of them has a lower."""
    return alternation_p_value(np.arange(steps) % 2 == 0)


# ------------------------------------------------------------------------------------------- return
@dataclass(frozen=True)
class Undone:
    """How much of the change since an earlier state the last step reverses.

    ``share`` is that part, ``error`` its standard error; ``nearness`` is the squared distance to
    the earlier state over that to the one just before.
    """

    share: float
    error: float
    nearness: float


def undone(
    grams: Float64[np.ndarray, "experts steps steps"], earlier: int, before: int, now: int
) -> Undone:
    r"""How far ``now`` takes back what led from ``earlier`` to ``before``.

    With :math:`u = s_b - s_j` and :math:`v = s_t - s_b`, both over all experts,
    :math:`\alpha = -\langle u, v \rangle / |u|^2`, and nearness :math:`|s_t - s_j|^2 / |v|^2`.
    Steps that go on independently of each other give 0, states that only scatter about a point
    1/2, a state that goes on from :math:`s_j` as if the rest had not been 1. The error is that of
    leaving out one expert after the other, nan with one; all are nan where nothing happened.
    """

    def between(a: int, b: int, c: int, d: int) -> Float64[np.ndarray, "experts"]:
        """<s_a - s_b, s_c - s_d> of each expert."""
        return grams[:, a, c] - grams[:, a, d] - grams[:, b, c] + grams[:, b, d]

    back = -between(before, earlier, now, before)
    done = between(before, earlier, before, earlier)
    last = float(between(now, before, now, before).sum())
    if done.sum() <= 0.0 or last <= 0.0:
        return Undone(math.nan, math.nan, math.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        without = (back.sum() - back) / (done.sum() - done)
    error = float(jackknife_error(without)) if np.isfinite(without).all() else math.nan
    nearness = float(between(now, earlier, now, earlier).sum()) / last
    return Undone(float(back.sum() / done.sum()), error, nearness)


# ------------------------------------------------------------------------------------------ in step
@dataclass(frozen=True)
class RankAgreement:
    """Correlation of ranks, half the 95 % range of it by chance, and the p-value of so large."""

    correlation: float
    by_chance: float
    p_value: float


def rank_agreement(
    one: Float64[np.ndarray, "steps experts"], other: Float64[np.ndarray, "steps experts"]
) -> RankAgreement:
    r"""Whether two figures of experts rank them alike, step by step, more than by chance.

    Ranks are taken within each step and centred, :math:`a_{ef} = \sum_t r_{te} q_{tf}`; the
    correlation is :math:`\sum_e a_{ee}` over its largest possible value. Under the null hypothesis
    the experts of one figure are numbered at random, the same at all steps, so that what is kept
    from step to step counts once. Then the sum has mean 0 and variance
    :math:`\sum_{ef} a_{ef}^2 / (E - 1)` (Hoeffding 1951, a has rows and columns of sum 0). The
    p-value is one-sided: of all numberings for up to eight experts, else from the Beta distribution
    with this variance between the least and the largest sum that any numbering has, and not below
    the share of numberings that change nothing, 1 / E! where no two experts are tied at all steps;
    for nine experts it is too small by a factor of up to 2 about 0.001, for more by less. A
    correlation of 0 and a p-value of 1
    for fewer than three experts, and where a figure ranks nothing.
    Oracle in tests: all numberings of seven experts, and scipy.stats.spearmanr.
    """
    from scipy.optimize import linear_sum_assignment
    from scipy.special import betainc
    from scipy.stats import rankdata

    experts = one.shape[1]
    r, q = (rankdata(figure, axis=1) - (experts + 1) / 2.0 for figure in (one, other))
    most = math.sqrt(float((r**2).sum()) * float((q**2).sum()))
    products = r.T @ q
    variance = float((products**2).sum()) / max(experts - 1, 1)
    if experts < 3 or most == 0.0 or variance <= 0.0:
        return RankAgreement(0.0, 1.0, 1.0)
    agreement = float(np.trace(products))
    by_chance = 1.96 * math.sqrt(variance) / most
    if experts <= _MOST_NUMBERED:
        sums = products[np.arange(experts), _numberings(experts)].sum(axis=1)
        p_value = float((sums >= agreement - 1e-9 * most).mean())
        return RankAgreement(agreement / most, by_chance, p_value)
    low, high = (
        float(products[linear_sum_assignment(products, maximize=largest)].sum())
        for largest in (False, True)
    )
    middle = -low / (high - low)
    spread = middle * (1.0 - middle) * (high - low) ** 2 / variance - 1.0
    p_value = 1.0
    if spread > 0.0:
        # betainc of the other end: no digits are lost in a small tail
        at = min(max((high - agreement) / (high - low), 0.0), 1.0)
        p_value = float(betainc((1.0 - middle) * spread, middle * spread, at))
    least = max(_share_without_effect(ranks) for ranks in (r, q))
    return RankAgreement(agreement / most, by_chance, max(p_value, least))


#: Experts up to which every numbering is tried.
_MOST_NUMBERED = 8


@cache
def _numberings(experts: int) -> Int64[np.ndarray, "numberings experts"]:
    return np.array(list(itertools.permutations(range(experts))), dtype=np.int64)


def _share_without_effect(ranks: Float64[np.ndarray, "steps experts"]) -> float:
    """Share of the numberings that only exchange experts of equal ranks at every step."""
    _, sizes = np.unique(ranks, axis=1, return_counts=True)
    experts = ranks.shape[1]
    return math.exp(sum(math.lgamma(size + 1.0) for size in sizes) - math.lgamma(experts + 1.0))
