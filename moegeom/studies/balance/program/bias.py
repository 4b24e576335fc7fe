"""Which bias, added to selection scores, makes every expert the choice of equally many tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from moegeom.core.shapes import Bool, Float, Float64, Int64
from moegeom.studies.balance.program.dual import contenders, minimise_smoothed
from moegeom.studies.balance.program.passes import chosen_counts, settle_whole_tokens, unevenness

#: Tokens of the first, coarse descent.
_COARSE_TOKENS = 2048

#: Experts beyond the chosen ones that a token keeps in view during the descent on all tokens.
_IN_VIEW = 24

#: Smoothings of the descents, in spreads of the scores; the last one is set by the fair count.
_COARSE = (0.3, 0.1, 0.04)
_FINE = (0.04, 0.012, 0.004)

#: Two scores are equal when they differ by less than this times the largest score: a few roundings
#: of the sum with the bias.
_ROUNDING = 1e-13


@dataclass(frozen=True, eq=False)
class BalancingBias:
    """A bias and what it achieves on the tokens it was made from.

    ``bias`` has mean 0. ``counts`` are the tokens that choose each expert with it, ties to the
    lower index. ``value`` is the optimum of the linear program and ``gap`` how far the dual at
    ``bias`` is above it, as a share of the spread of the scores times the number of slots. At the
    optimum of the dual ``num_tied`` tokens have equal scores on both sides of the border of their
    chosen set: up to one for every expert but one is usual, and no bias can do without. These
    three are None where too many choices were open to be proved optimal.
    """

    bias: Float64[np.ndarray, "experts"]
    counts: Int64[np.ndarray, "experts"]
    value: float | None
    gap: float | None
    num_tied: int | None


def score_spread(scores: Float[np.ndarray, "tokens experts"]) -> float:
    """Standard deviation over experts (ddof 0), as root mean square over tokens; 0 for one."""
    centred = scores.astype(np.float64)
    centred -= centred.mean(axis=1, keepdims=True)
    return float(np.sqrt((centred**2).mean()))


def balancing_bias(
    scores: Float[np.ndarray, "tokens experts"],
    top_k: int,
    start: Float64[np.ndarray, "experts"] | None = None,
) -> BalancingBias:
    r"""The bias b for which the top k of q + b gives every expert m = kT/E tokens.

    :math:`\min_b \sum_t \mathrm{topsum}_k(q_t + b) - m \sum_e b_e`, the dual of the linear program
    :math:`\max \sum x q` with :math:`\sum_e x_{te} = k, \sum_t x_{te} = m, 0 \le x \le 1`: convex,
    with counts less quota as its slope. Smoothed Newton descents on a part of the tokens and on
    all, then HiGHS on the choices that are still open, then whole tokens by coordinate passes.
    ``start`` replaces the descent on a part.

    With k = E, one expert or no token every bias does the same, and 0 is returned. Tokens or
    experts with equal scores cannot be told apart: the counts are then as even as was found.
    Scores must be finite. Source: docs/theory.md D3 (quotas). Oracle in tests: HiGHS on the whole
    program.
    """
    tokens, experts = scores.shape
    q = scores.astype(np.float64)
    if tokens == 0 or top_k == experts:
        counts = np.full(experts, tokens, dtype=np.int64)
        return BalancingBias(np.zeros(experts), counts, float(q.sum()), 0.0, 0)
    middle = q.mean(axis=1, keepdims=True)
    q -= middle
    spread = float(np.sqrt((q**2).mean()))
    quota = top_k * tokens / experts
    level = q.mean(axis=0)
    rounding = 4.0 * float(np.finfo(scores.dtype).eps) * float(np.abs(scores).max())
    if np.abs(q - level).max() <= max(rounding, _largest(q, level)):
        # every token alike, but for the rounding of its scores, over which a program would go on
        # for ever: with all experts level, any choice is optimal and every token a tie
        counts = chosen_counts(scores - level, top_k)
        return BalancingBias(-level, counts, top_k * float(middle.sum()), 0.0, tokens)
    smooth, smoothing = _descend(q, top_k, quota, spread, start)
    exact = solve_program(q, smooth, top_k, reach=4.0 * smoothing)
    optimum = smooth if exact is None else exact.bias
    num_tied = None
    if exact is not None:
        num_tied = len(tied_tokens(q + optimum, top_k, _largest(q, optimum)))
    tried, counted = [], []
    for begin in (smooth, optimum):
        bias = settle_whole_tokens(q, begin, top_k, quota, top_k + _IN_VIEW)
        tried.append(bias - bias.mean())
        counted.append(chosen_counts(scores + tried[-1], top_k))
        if counted[-1].max() <= np.ceil(quota):
            break
    best = min(range(len(tried)), key=lambda n: unevenness(counted[n]))
    value = gap = None
    if exact is not None:
        value = exact.value + top_k * float(middle.sum())
        excess = dual_value(q, tried[best], top_k, quota) - exact.value
        gap = max(excess, exact.gap) / (spread * top_k * tokens)
    return BalancingBias(tried[best], counted[best], value, gap, num_tied)


def _descend(
    q: Float64[np.ndarray, "tokens experts"],
    top_k: int,
    quota: float,
    spread: float,
    start: Float64[np.ndarray, "experts"] | None,
) -> tuple[Float64[np.ndarray, "experts"], float]:
    """A bias near the optimum, and the last smoothing: about the distance of one token to the next
    along an expert's border.
    """
    tokens, experts = q.shape
    last = spread * min(0.3 / quota, _FINE[-1])
    if start is None:
        part = q
        if tokens > _COARSE_TOKENS:
            picked = np.random.Generator(np.random.PCG64(0)).permutation(tokens)[:_COARSE_TOKENS]
            part = q[picked]
        # each expert by itself: the level that its fair share of the tokens exceeds
        bias = -np.quantile(part, 1.0 - top_k / experts, axis=0)
        whole = contenders(part, bias, experts)
        fair = top_k * len(part) / experts
        for smoothing in _COARSE:
            bias = minimise_smoothed(whole, bias, top_k, fair, spread * smoothing, 0.05 * fair)
    else:
        bias = start
    for smoothing in (*(spread * s for s in _FINE), last):
        near = contenders(q, bias, top_k + _IN_VIEW)
        bias = minimise_smoothed(near, bias, top_k, quota, smoothing, max(0.005 * quota, 0.3))
    return bias - bias.mean(), last


def _largest(
    q: Float64[np.ndarray, "tokens experts"], bias: Float64[np.ndarray, "experts"]
) -> float:
    """The difference below which two biased scores are equal within rounding."""
    return _ROUNDING * float(np.abs(q).max() + np.abs(bias).max())


def duplicate_experts(scores: Float[np.ndarray, "tokens experts"]) -> list[tuple[int, ...]]:
    """Groups of experts whose scores differ by the same number for every token.

    No bias tells them apart: whichever is ahead is ahead for all tokens. Equal within four
    roundings of float32 at the largest score; beginning with the lowest number. None for fewer
    than two tokens, where every expert would qualify.
    """
    tokens = len(scores)
    if tokens < 2:
        return []
    weight = np.random.Generator(np.random.PCG64(0)).standard_normal(tokens)
    weight -= weight.mean()  # blind to a number that is added to a whole column
    image = weight @ scores.astype(np.float64)
    allowed = 4.0 * np.finfo(np.float32).eps * float(np.abs(scores).max())
    order = np.argsort(image, kind="stable")
    gaps = np.abs(np.diff(image[order])) <= allowed * float(np.abs(weight).sum())
    found = []
    for run in np.split(order, np.flatnonzero(~gaps) + 1):
        left = sorted(run.tolist())
        while len(left) > 1:
            first = scores[:, left[0]].astype(np.float64)
            same = [e for e in left if float(np.ptp(scores[:, e] - first)) <= allowed]
            left = [e for e in left if e not in same]
            if len(same) > 1:
                found.append(tuple(same))
    return sorted(found)


#: Open choices that are handed to the solver at most: it takes about a second for as many.
MOST_OPEN = 40_000


@dataclass(frozen=True, eq=False)
class ProgramSolution:
    """Value of the linear program, the bias that proves it, and what is left between the two.

    ``gap`` is the dual value at ``bias`` less ``value``: 0 within rounding, as any bias and any
    feasible choice enclose the optimum.
    """

    bias: Float64[np.ndarray, "experts"]
    value: float
    gap: float


def top_sums(
    biased: Float64[np.ndarray, "tokens experts"], top_k: int
) -> Float64[np.ndarray, "tokens"]:
    """Sum of the ``top_k`` largest biased scores of each token."""
    experts = biased.shape[1]
    return np.partition(biased, experts - top_k, axis=1)[:, experts - top_k :].sum(axis=1)


def dual_value(
    scores: Float64[np.ndarray, "tokens experts"],
    bias: Float64[np.ndarray, "experts"],
    top_k: int,
    quota: float,
) -> float:
    r""":math:`\sum_t \mathrm{topsum}_k(q_t + b) - m \sum_e b_e`: at least the optimum."""
    return float(top_sums(scores + bias, top_k).sum() - quota * bias.sum())


def solve_program(
    scores: Float64[np.ndarray, "tokens experts"],
    bias: Float64[np.ndarray, "experts"],
    top_k: int,
    reach: float,
) -> ProgramSolution | None:
    r"""The optimum of :math:`\max \sum x q`, beginning from a bias that is nearly optimal.

    :math:`\sum_e x_{te} = k, \sum_t x_{te} = kT/E, 0 \le x \le 1`. Choices further than ``reach``
    from the border of their token's chosen set are taken as settled, HiGHS finds the rest, and its
    multipliers are the bias. That nothing was settled wrongly is seen from the gap, over all
    tokens and experts; ``reach`` grows until it closes. None when that needs more open choices
    than MOST_OPEN. Oracle: HiGHS on the whole program.
    """
    tokens, experts = scores.shape
    quota = top_k * tokens / experts
    biased = scores + bias
    border = np.partition(biased, (experts - top_k - 1, experts - top_k), axis=1)
    level = 0.5 * (border[:, experts - top_k - 1] + border[:, experts - top_k])
    lead = biased - level[:, None]
    size = float(np.abs(scores).sum(axis=1).mean()) * tokens
    while True:
        # a token whose own border is wide keeps both neighbours open, however short the reach
        is_open = np.abs(lead) <= reach
        if is_open.sum() > MOST_OPEN:
            return None
        found = _solve_open(lead, is_open, top_k, quota)
        if found is not None:
            choice, multiplier = found
            proof = bias + multiplier
            value = float((scores[lead > reach]).sum() + (scores[is_open] * choice).sum())
            gap = dual_value(scores, proof, top_k, quota) - value
            if gap <= 1e-11 * size:
                return ProgramSolution(proof, value, max(gap, 0.0))
        if is_open.all():
            return None
        reach *= 3.0


def _solve_open(
    lead: Float64[np.ndarray, "tokens experts"],
    is_open: Bool[np.ndarray, "tokens experts"],
    top_k: int,
    quota: float,
) -> tuple[Float64[np.ndarray, "open"], Float64[np.ndarray, "experts"]] | None:
    """Shares of the open choices and the multiplier of each expert; None if they cannot do."""
    from scipy.optimize import linprog

    is_settled = (lead > 0.0) & ~is_open
    token, expert = np.nonzero(is_open)
    named, row = np.unique(token, return_inverse=True)
    places = top_k - is_settled.sum(axis=1)
    if (np.delete(places, named) != 0).any():
        return None
    wanted = quota - is_settled.sum(axis=0)
    rows = np.concatenate([row, len(named) + expert])
    columns = np.tile(np.arange(len(token)), 2)
    shape = (len(named) + lead.shape[1], len(token))
    table = csr_array((np.ones(len(rows)), (rows, columns)), shape=shape)
    if (np.asarray(table.sum(axis=1)).ravel() == 0)[len(named) :].any():
        return None  # an expert without open choices has no multiplier
    ends = np.concatenate([places[named].astype(np.float64), wanted])
    unit = float(np.abs(lead[is_open]).max()) or 1.0
    solved = linprog(-lead[is_open] / unit, A_eq=table, b_eq=ends, bounds=(0, 1), method="highs")
    if solved.status != 0:
        return None
    multiplier = np.asarray(solved.eqlin.marginals)[len(named) :] * unit
    return np.asarray(solved.x), multiplier


def tied_tokens(
    biased: Float64[np.ndarray, "tokens experts"], top_k: int, tolerance: float
) -> Int64[np.ndarray, "tied"]:
    """Tokens whose last chosen and first other score differ by no more than ``tolerance``."""
    experts = biased.shape[1]
    if top_k == experts:
        return np.empty(0, dtype=np.int64)
    border = np.partition(biased, (experts - top_k - 1, experts - top_k), axis=1)
    margin = border[:, experts - top_k] - border[:, experts - top_k - 1]
    return np.flatnonzero(margin <= tolerance)
