"""How tokens spread over experts, what chance alone would do, how consistent choices are.

Counts N of pairs are symmetric, N_ij the tokens that chose both, the diagonal those that chose the
expert. A label of a token is a number, such as its id. Every slot is filled, and no expert fills
two of a token.

For chance, documents (or runs of tokens, where none are known) are the sampling unit. Everything is
derived from how the counts of the units scatter, so that dependence between the tokens of one
document is in it; docs/theory.md D3 has the floors for independent tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64, Int, Int64
from moegeom.geometry.selection import SCORES

# ----------------------------------------------------------------------------------------- evenness
#: One number per vector of counts: a NumPy scalar when there is only one vector.
PerVector = Float64[np.ndarray, "*batch"] | np.float64

#: An expert below this share of its fair load is underused (docs/theory.md D3, there "dead").
UNDERUSED_BELOW = 0.1


def _fair(counts: Int64[np.ndarray, "*batch experts"]) -> Float64[np.ndarray, "*batch 1"]:
    """Mean count per expert; nan instead of 0, so that nothing measured stays nothing."""
    mean = counts.mean(axis=-1, keepdims=True)
    return np.where(mean == 0.0, np.nan, mean)


def load_share(
    counts: Int64[np.ndarray, "*batch experts"],
) -> Float64[np.ndarray, "*batch experts"]:
    """Load in units of the fair share, c_e E / sum c; 1 is fair; nan when nothing was chosen."""
    return counts / _fair(counts)


def load_cv(counts: Int64[np.ndarray, "*batch experts"], ddof: int = 0) -> PerVector:
    """Standard deviation of the counts divided by their mean; 0 at balance.

    ``ddof`` 0 is the population value; both occur in practice. Source: docs/theory.md D3; oracle:
    scipy.stats.variation.
    """
    return load_share(counts).std(axis=-1, ddof=ddof)


def max_vio(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    """Largest load over the fair share, minus 1; in [0, E/k - 1].

    Source: arXiv 2408.15664, equation 4.
    """
    return load_share(counts).max(axis=-1) - 1.0


def gini(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    r"""Gini coefficient, :math:`\sum_i (2i - E - 1) c_{(i)} / (E \sum c)`, counts ascending.

    0 at balance, 1 - 1/E when one expert takes everything. Oracle: mean absolute difference.
    """
    experts = counts.shape[-1]
    ranks = 2.0 * np.arange(1, experts + 1) - experts - 1.0
    ascending = np.sort(load_share(counts), axis=-1)
    return (ascending * ranks).sum(axis=-1) / experts**2


def load_entropy_nats(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    """Entropy of the share of slots that each expert takes, in nats; log E at balance.

    0 log 0 = 0. Oracle: scipy.stats.entropy.
    """
    share = load_share(counts) / counts.shape[-1]
    # log 1 = 0 stands in for log 0, whose share is 0
    return -(share * np.log(np.where(share == 0.0, 1.0, share))).sum(axis=-1)


def dead_share(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    """Share of experts that no token chose."""
    return np.where(np.isnan(_fair(counts)[..., 0]), np.nan, (counts == 0).mean(axis=-1))


def underused_share(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    """Share of experts with less than a tenth of the fair load, dead ones included."""
    share = load_share(counts)
    underused = (share < UNDERUSED_BELOW).mean(axis=-1)
    return np.where(np.isnan(_fair(counts)[..., 0]), np.nan, underused)


def load_cv_squared_debiased(block_counts: Int64[np.ndarray, "blocks experts"]) -> float:
    r"""Squared CV of the expected load, without what the choice of documents adds.

    :math:`\sum_{a \ne b} v_a v_b \langle x_a - 1, x_b - 1 \rangle / (E (1 - \sum v^2))`, x_b the
    load of block b in fair shares and v_b its share of the slots: products of different blocks,
    whose errors are independent, so that the mean over documents is the true value. Negative when
    nothing but noise is seen. nan for fewer than two blocks with tokens.
    Oracle in tests: Monte Carlo over documents.
    """
    counts = block_counts[block_counts.sum(axis=1) > 0].astype(np.float64)
    if len(counts) < 2:
        return float("nan")
    share = counts.sum(axis=1) / counts.sum()
    excess = (load_share(counts.astype(np.int64)) - 1.0) * share[:, None]
    products = (excess.sum(axis=0) ** 2).sum() - (excess**2).sum()
    return float(products / (counts.shape[1] * (1.0 - (share**2).sum())))


def max_vio_floor(num_tokens: int, num_experts: int, top_k: int) -> float:
    r"""MaxVio that perfectly even random routing shows on this many independent tokens, at most.

    :math:`\sqrt{2 \log E (1 - k/E) / m}`, m = kT/E; about a fifth above the mean (E = 64, k = 8).
    nan without tokens. Source: docs/theory.md D3; oracle: Monte Carlo.
    """
    return math.sqrt(2.0 * math.log(num_experts)) * load_cv_floor(num_tokens, num_experts, top_k)


def load_cv_floor(num_tokens: int, num_experts: int, top_k: int) -> float:
    r"""CV that perfectly even random routing shows on this many independent tokens.

    :math:`\sqrt{(1 - k/E) / m}` with m = kT/E tokens per expert. Real tokens are not independent,
    so a balanced router shows more. nan without tokens.
    Source: docs/theory.md D3; oracle: Monte Carlo.
    """
    if num_tokens == 0:
        return float("nan")
    mean = top_k * num_tokens / num_experts
    return float(np.sqrt((1.0 - top_k / num_experts) / mean))


# ----------------------------------------------------------------------------------------- capacity
def expert_capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Tokens that an expert may take, ceil(f k T / E).

    In fractions, with the factor as people write it: 1.1 is 11/10, so that 1.1 times 10 is 11 and
    not, by the rounding of 1.1 to a float, 12. Source: docs/theory.md D3.
    """
    above, below = Fraction(repr(float(factor))).as_integer_ratio()
    return -(-above * top_k * num_tokens // (below * num_experts))


def dropped_slot_share(
    counts: Int64[np.ndarray, "*#batch experts"], capacity: int | Int64[np.ndarray, "*#batch"]
) -> PerVector:
    r"""Share of slots over the capacity of their expert, sum max(0, c_e - C) / sum c; nan without.

    Source: docs/theory.md D3.
    """
    total = counts.sum(axis=-1)
    over = np.maximum(counts - np.asarray(capacity)[..., None], 0).sum(axis=-1)
    return over / np.where(total, total, np.nan)


def rank_imbalance(counts: Int64[np.ndarray, "*batch experts"], num_ranks: int) -> PerVector:
    """Largest load of equal groups of consecutive experts over their mean; 1 to ``num_ranks``.

    nan without tokens, and when ``num_ranks`` does not divide the number of experts.
    """
    if counts.shape[-1] % num_ranks:
        return np.full(counts.shape[:-1], np.nan)[()]
    loads = counts.reshape(*counts.shape[:-1], num_ranks, -1).sum(axis=-1)
    return load_share(loads).max(axis=-1)


# ------------------------------------------------------------------------------- entropy of a token
def normalised_scores(
    logits: Float[np.ndarray, "tokens experts"], score: str
) -> Float64[np.ndarray, "tokens experts"]:
    r"""Scores over their sum, :math:`p_i = s(z_i) / \sum_j s(z_j)`; rows sum to 1.

    Softmax scores are such a distribution already; raw logits (``identity``) are turned into one by
    softmax. Computed as the softmax of log s, so that scores which underflow keep their ratio.
    Source: docs/theory.md D3. Oracle in tests: torch.
    """
    z = logits.astype(np.float64)
    if score == "sigmoid":
        z = np.minimum(z, 0.0) - np.log1p(np.exp(-np.abs(z)))
    elif score == "sqrt_softplus":
        softplus = np.maximum(z, 0.0) + np.log1p(np.exp(-np.abs(z)))
        # log(1 + e^z) ~ e^z far below 0, where the sum would lose it
        z = np.where(z < -30.0, z, np.log(np.maximum(softplus, 1e-300))) / 2.0
    return SCORES["softmax"](z)


def entropy_nats(probability: Float[np.ndarray, "tokens experts"]) -> Float64[np.ndarray, "tokens"]:
    """Entropy of each row, -sum p log p with 0 log 0 = 0, in nats; 0 to log E.

    Oracle in tests: scipy.stats.entropy.
    """
    p = probability.astype(np.float64)
    # log 1 = 0 stands in for log 0; a nan stays a nan
    return -(p * np.log(np.where(p == 0.0, 1.0, p))).sum(axis=1) + 0.0


def log_sum_exp(logits: Float[np.ndarray, "tokens experts"]) -> Float64[np.ndarray, "tokens"]:
    """Logarithm of the sum of exponentials of each row; the largest entry is taken out first.

    Oracle in tests: scipy.special.logsumexp.
    """
    z = logits.astype(np.float64)
    largest = z.max(axis=1)
    return largest + np.log(np.exp(z - largest[:, None]).sum(axis=1))


# -------------------------------------------------------------------------------------------- pairs
Pairs = Int64[np.ndarray, "experts experts"]


@cache
def expert_pairs(num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Lower and higher expert of each pair."""
    return np.triu_indices(num_experts, 1)


def jaccard_mean(counts: Pairs) -> float:
    r"""Mean over pairs of :math:`N_{ij} / (N_i + N_j - N_{ij})`; nan when no pair has a token.

    Pairs of two dead experts are left out. Source: docs/theory.md D3; oracle: sets of tokens.
    """
    own = np.diag(counts)
    first, second = expert_pairs(len(counts))
    together = counts[first, second]
    either = own[first] + own[second] - together
    used = either > 0
    return float((together[used] / either[used]).mean()) if used.any() else float("nan")


def jaccard_chance(num_experts: int, top_k: int) -> float:
    """The same for sets drawn evenly, (k - 1) / (2E - k - 1); nan for a single expert.

    In the limit of many tokens. Source: docs/theory.md D3; oracle in tests: drawn sets.
    """
    if num_experts < 2:
        return float("nan")
    return (top_k - 1) / (2 * num_experts - top_k - 1)


def coactivation_over_chance(
    counts: Pairs, num_tokens: int, top_k: int
) -> Float64[np.ndarray, "experts experts"]:
    r"""Frequency of each pair over that of even chance, :math:`k (k - 1) / (E (E - 1))`.

    The diagonal means nothing. nan for k = 1, where no pair can be chosen, and without tokens.
    Source: docs/theory.md D3.
    """
    experts = len(counts)
    if top_k < 2 or not num_tokens:
        return np.full((experts, experts), np.nan)
    return counts / num_tokens / (top_k * (top_k - 1) / (experts * (experts - 1)))


def largest(counts: Int64[np.ndarray, "all"], most: int) -> Int64[np.ndarray, "some"]:
    """Places of the ``most`` largest counts, descending; the first of equal ones comes first."""
    least = np.partition(counts, -most)[-most] if len(counts) > most else 0
    place = np.flatnonzero(counts >= least)
    return place[np.argsort(-counts[place], kind="stable")[:most]]


def most_frequent(counts: Int64[np.ndarray, "experts experts"], most: int) -> dict[str, np.ndarray]:
    """At most ``most`` pairs: ``expert_out``, ``expert_in``, ``num_tokens`` and ``share``.

    Pairs without a token are left out; the lower pair comes first among equals. The share is of
    all counts.
    """
    flat = counts.reshape(-1)
    top = largest(flat, most)
    top = top[flat[top] > 0]
    out, into = np.divmod(top, len(counts))
    share = flat[top] / max(int(flat.sum()), 1)
    return {"expert_out": out, "expert_in": into, "num_tokens": flat[top], "share": share}


# --------------------------------------------------------------------------------------------- sets
def good_turing_coverage(counts: Int64[np.ndarray, "expert_sets"]) -> float:
    """Estimated share of future tokens whose expert set was already seen, 1 - f1 / T.

    f1 expert sets were seen once, T tokens in all; nan without tokens. Source: docs/theory.md B4.
    """
    total = int(counts.sum())
    return float("nan") if total == 0 else 1.0 - np.count_nonzero(counts == 1) / total


def chao1(counts: Int64[np.ndarray, "expert_sets"]) -> float:
    """Lower estimate of the number of expert sets, S + f1 (f1 - 1) / (2 (f2 + 1)).

    The bias-corrected form, finite without any expert set seen twice. Source: docs/theory.md B4.
    """
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return len(counts) + once * (once - 1) / (2.0 * (twice + 1))


#: Coverage below which the entropy of expert sets is beyond its estimator: sets that are not seen
#: yet lower it by .2 nats where frequencies fall by a power law, and by any amount elsewhere.
LEAST_COVERAGE = 0.95

#: Pairs of tokens that must share an expert set: of fewer the logarithm has an error above a third.
LEAST_PAIRS = 10


def expert_set_entropy_nats(counts: Int64[np.ndarray, "expert_sets"]) -> float:
    """Entropy of the expert set distribution with the Miller-Madow correction, in nats.

    Plug-in entropy plus (S - 1) / (2 T). nan without tokens. T exp((T - 1) / 2T) sets at most,
    however many there are: to be read where :func:`good_turing_coverage` is LEAST_COVERAGE or more.
    Source: docs/theory.md B4; oracle: scipy.stats.entropy.
    """
    total = int(counts.sum())
    if total == 0:
        return float("nan")
    share = counts[counts > 0] / total
    return float(-(share * np.log(share)).sum() + (len(share) - 1) / (2.0 * total))


def pairs_of_equals(counts: Int64[np.ndarray, "values"]) -> tuple[int, int]:
    r"""Pairs of different tokens with one value, :math:`\sum_i n_i (n_i - 1) / 2`, and all pairs.

    Their ratio estimates :math:`\sum_i p_i^2` without bias, however few of the values are seen (a
    U-statistic). Oracle in tests: all pairs.
    """
    total = int(counts.sum())
    return int((counts * (counts - 1)).sum()) // 2, total * (total - 1) // 2


def collision_entropy_nats(
    counts: Int64[np.ndarray, "expert_sets"], least: int = LEAST_PAIRS
) -> float:
    r"""Renyi's entropy of order 2, :math:`-\log \sum_i p_i^2`, from pairs of tokens, in nats.

    At most Shannon's; its exponential is the number of equally frequent sets under which two tokens
    share theirs as often. Does not saturate: T tokens have T (T - 1) / 2 pairs. nan below
    ``least`` pairs with one set. Source: docs/theory.md B4. Oracle in tests: known laws.
    """
    equal, pairs = pairs_of_equals(counts)
    return math.log(pairs / equal) if equal >= max(least, 1) else float("nan")


def pair_overlap(counts: Int64[np.ndarray, "*batch experts"], top_k: int) -> PerVector:
    r"""Mean of :math:`|A \cap B| / k` over pairs of different tokens, from the loads of experts.

    :math:`\sum_e c_e (c_e - 1) / (k T (T - 1))`: about k / E (1 + CV^2), 1 where all tokens choose
    alike. nan for fewer than two tokens. Oracle in tests: all pairs.
    """
    loads = counts.astype(np.float64)
    tokens = loads.sum(axis=-1) / top_k
    pairs = np.where(tokens < 2.0, np.nan, tokens * (tokens - 1.0))
    return (loads * (loads - 1.0)).sum(axis=-1) / (top_k * pairs)


# ------------------------------------------------------------------------------------------- chance
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
    from scipy.special import stdtr

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
    return fell, float(stdtr(units - 1, -fell / error))


#: Share of what others lie on, up to which load lies on few experts; heuristic.
FEW_EXPERTS = 0.5

#: Other units that there must be for a part to be low beside them, and how often the depth of the
#: next lowest part it must have: depths of parts vary by more than a normal distribution says.
_LEAST_OTHERS, _LEAST_DEPTH = 8, 2.0


class LowPart(NamedTuple):
    """Units from ``first`` to ``last`` whose mean is ``fall`` below that of the others, out of
    ``num_tests`` parts; -1 where none is low.
    """

    first: int
    last: int
    fall: float
    p_value: float
    num_tests: int


def effective_by_unit(
    counts: Int64[np.ndarray, "units experts"], top_k: int
) -> Float64[np.ndarray, "units"]:
    r"""Experts that the tokens of a unit lie on, :math:`1 / q`, at most E.

    q is the probability that slots of two different tokens hold one expert, which has no bias where
    tokens are few, as entropies have: E at even load, k where all tokens choose alike.
    """
    experts = counts.shape[1]
    return top_k / np.maximum(pair_overlap(counts, top_k), top_k / experts)


def lowest_part(values: Float64[np.ndarray, "units"], least_fall: float) -> LowPart:
    r"""The run of 1, 2, 4, .. units, half of them at most, whose mean is low least by chance.

    :math:`t = (\bar y_o - \bar y_p) / (s_o \sqrt{1/m + 1/(n - m)})` with mean and standard
    deviation of the n - m others alone, Student's t with n - m - 1 degrees of freedom, times the
    number of runs. A run that falls by less than ``least_fall``, or is not twice as far below the
    median run of its size as the next apart from it, is none. Its ends are the units nearer to it
    than to the others. Oracle in tests: the definition.
    """
    from scipy.special import stdtr

    num, num_tests = len(values), 0
    total, squares = (np.concatenate([[0.0], np.cumsum(v)]) for v in (values, values**2))
    best = (1.0, 0.0, 0, 0)
    size = 1
    while size <= min(num // 2, num - _LEAST_OTHERS):
        others = num - size
        own = total[size:] - total[:-size]
        mean = (total[-1] - own) / others
        variance = squares[-1] - (squares[size:] - squares[:-size]) - others * mean**2
        error = np.sqrt(np.maximum(variance, 0.0) / (others - 1) * (1.0 / size + 1.0 / others))
        fall = mean - own / size
        t = np.divide(fall, error, out=np.where(fall > 0.0, np.inf, 0.0), where=error > 0.0)
        p_value = np.where(fall >= least_fall, stdtr(others - 1, -t), 1.0)
        num_tests += len(own)
        at = int(np.lexsort((-fall, p_value))[0])
        best = min(best, (float(p_value[at]), -float(fall[at]), at, size))
        size *= 2
    p_value, fall, first, size = best
    if p_value == 1.0 or not _stands_out((total[size:] - total[:-size]) / size, first, size):
        return LowPart(-1, -1, 0.0, 1.0, num_tests)
    inside = slice(first, first + size)
    middle = values[inside].mean() - 0.5 * fall
    is_low = np.concatenate([[False], values < middle, [False]])
    low = first + np.flatnonzero(is_low[1:-1][inside])
    last = int(low[-1]) + int(np.argmin(is_low[low[-1] + 1 :])) - 1
    first = int(low[0]) - int(np.argmin(is_low[low[0] + 1 :: -1])) + 1
    return LowPart(first, last, -fall, min(1.0, p_value * num_tests), num_tests)


def _stands_out(means: Float64[np.ndarray, "runs"], at: int, size: int) -> bool:
    """Whether the run at a place is far below those apart from it, by a run where there are any."""
    for near in (2 * size, size):
        apart = np.delete(means, slice(max(0, at - near + 1), at + near))
        if len(apart):
            middle = float(np.median(apart))
            return middle - float(means[at]) >= _LEAST_DEPTH * (middle - float(apart.min()))
    return False


# -------------------------------------------------------------------------------------- consistency
Chosen = Int[np.ndarray, "tokens k"]


def num_shared(first: Chosen, second: Chosen) -> Int64[np.ndarray, "tokens"]:
    r""":math:`|A_t \cap B_t|`, the experts of each token that both routings choose; 0 to k.

    Oracle in tests: Python's sets.
    """
    # in the sorted union of two rows a shared expert stands twice, next to itself
    both = np.sort(np.concatenate([first, second], axis=1), axis=1)
    return (both[:, 1:] == both[:, :-1]).sum(axis=1)


def overlap_share(first: Chosen, second: Chosen) -> Float64[np.ndarray, "tokens"]:
    r""":math:`|A_t \cap B_t| / k` of each token: 1 for equal sets, 0 for sets that share nothing.

    For sets drawn evenly and independently its mean is k / E. Source: docs/theory.md D3 (a).
    """
    return num_shared(first, second) / first.shape[1]
