"""Which bias, added to selection scores, makes every expert the choice of equally many tokens.

The program of balancing and its smoothed dual, Newton steps down to a small smoothing, and whole
tokens: biases between the ties of the program, and updates for rules with groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64, Int32, Int64, Integer, Shaped
from moegeom.geometry import load
from moegeom.geometry.keys import expert_set_key
from moegeom.geometry.set_code import chosen_mask, last_and_next
from moegeom.geometry.whatif import hard_set

# ---------------------------------------------------------------------------------- smoothed dual
#: Newton steps at one smoothing. Warm starts need five to ten; more do not pay.
_STEPS = 25

#: Entries of x (1 - x) below this move no gradient by a thousandth of a token.
_NEGLIGIBLE = 1e-9


@dataclass(frozen=True, eq=False)
class Contenders:
    """The experts of each token that can be chosen or nearly so: their numbers and scores.

    ``is_whole`` says that every expert contends for every token, in order of its number.
    """

    scores: Float64[np.ndarray, "tokens contenders"]
    expert: Int64[np.ndarray, "tokens contenders"]
    is_whole: bool


def contenders(
    scores: Float64[np.ndarray, "tokens experts"], bias: Float64[np.ndarray, "experts"], size: int
) -> Contenders:
    """The ``size`` experts with the largest biased score of each token; all where few are left."""
    experts = scores.shape[1]
    if size + 8 >= experts:
        everyone = np.broadcast_to(np.arange(experts), scores.shape)
        return Contenders(scores, everyone, True)
    largest = np.argpartition(scores + bias, experts - size, axis=1)[:, experts - size :]
    return Contenders(np.take_along_axis(scores, largest, axis=1), largest, False)


def minimise_smoothed(
    near: Contenders,
    bias: Float64[np.ndarray, "experts"],
    top_k: int,
    quota: float,
    smoothing: float,
    tolerance: float,
) -> Float64[np.ndarray, "experts"]:
    r"""The bias that minimises the smoothed dual, by Newton steps that only go down.

    :math:`F(b) = \sum_t \min_\nu [\epsilon \sum_e \log(1 + e^{(q_{te} + b_e - \nu)/\epsilon}) +
    k \nu] - m \sum_e b_e`, whose derivative is the expected count less the quota when expert e is
    chosen with probability :math:`x_{te} = 1 / (1 + e^{-(q_{te} + b_e - \nu_t)/\epsilon})`. Convex,
    and tends to the dual of the linear program for small :math:`\epsilon`. Ends when no expected
    count is further than ``tolerance`` from the quota. Oracle: HiGHS, at the end of the descent.
    """
    point = _point(near, bias, top_k, quota, smoothing)
    for _ in range(_STEPS):
        if np.abs(point.gradient).max() <= tolerance:
            break
        step = _newton_step(near, point, smoothing)
        slope, size = float(step @ point.gradient), 1.0
        if not slope < 0.0:
            break
        while size > 1e-3:
            tried = _point(near, point.bias + size * step, top_k, quota, smoothing)
            if tried.value <= point.value + 1e-4 * size * slope:
                break
            size *= 0.3
        else:
            break
        point = tried
    return point.bias


@dataclass(frozen=True, eq=False)
class _Point:
    bias: Float64[np.ndarray, "experts"]
    value: float
    gradient: Float64[np.ndarray, "experts"]
    chance: Float64[np.ndarray, "tokens contenders"]


def _point(
    near: Contenders,
    bias: Float64[np.ndarray, "experts"],
    top_k: int,
    quota: float,
    smoothing: float,
) -> _Point:
    z = (near.scores + (bias if near.is_whole else bias[near.expert])) / smoothing
    level = _levels(z, top_k)
    z -= level[:, None]
    decay = np.exp(-np.abs(z))
    chance = np.where(z >= 0.0, 1.0, decay) / (1.0 + decay)
    softplus = (np.maximum(z, 0.0) + np.log1p(decay)).sum()
    value = smoothing * float(softplus + top_k * level.sum()) - quota * float(bias.sum())
    if near.is_whole:
        expected = chance.sum(axis=0)
    else:
        expected = np.bincount(near.expert.ravel(), chance.ravel(), len(bias))
    return _Point(bias, value, expected - quota, chance)


def _levels(
    z: Float64[np.ndarray, "tokens contenders"], top_k: int
) -> Float64[np.ndarray, "tokens"]:
    """The level of each token at which the chances add up to ``top_k``: Newton, inside a bracket.

    The sum falls with the level from the number of contenders to 0, and is ``top_k`` once.
    """
    last, following = last_and_next(z, top_k)
    level = 0.5 * (following + last)
    low, high = z.min(axis=1) - 50.0, z.max(axis=1) + 50.0
    open_rows = np.arange(len(z))
    for _ in range(60):
        part = z[open_rows] - level[open_rows, None]
        chance = 0.5 * (1.0 + np.tanh(0.5 * part))
        excess = chance.sum(axis=1) - top_k
        slope = (chance * (1.0 - chance)).sum(axis=1)
        is_open = np.abs(excess) > 1e-11 * top_k
        if not is_open.any():
            break
        open_rows, excess, slope = open_rows[is_open], excess[is_open], slope[is_open]
        at = level[open_rows]
        low[open_rows] = np.where(excess > 0.0, at, low[open_rows])
        high[open_rows] = np.where(excess > 0.0, high[open_rows], at)
        step = at + excess / np.maximum(slope, 1e-300)
        is_inside = (step > low[open_rows]) & (step < high[open_rows])
        level[open_rows] = np.where(is_inside, step, 0.5 * (low[open_rows] + high[open_rows]))
    return level


def _newton_step(
    near: Contenders, point: _Point, smoothing: float
) -> Float64[np.ndarray, "experts"]:
    """Minus the inverse of the second derivative times the gradient, no longer than 20 smoothings.

    The second derivative is the Laplacian of a graph that joins experts that contend for the same
    tokens. It is 0 for a common shift, so a small multiple of the identity is added.
    """
    from scipy.linalg import cho_factor, cho_solve
    from scipy.sparse import csr_array

    wavering = point.chance * (1.0 - point.chance)
    of_token = wavering.sum(axis=1)
    rows = of_token > _NEGLIGIBLE
    wavering, of_token = wavering[rows], of_token[rows]
    experts = len(point.bias)
    if near.is_whole:
        own = wavering.sum(axis=0)
        shared = wavering.T @ (wavering / of_token[:, None])
    else:
        is_entry = wavering > _NEGLIGIBLE
        places = np.nonzero(is_entry)[0], near.expert[rows][is_entry]
        table, scaled = (
            csr_array((values[is_entry], places), shape=(len(values), experts))
            for values in (wavering, wavering / of_token[:, None])
        )
        own = np.asarray(table.sum(axis=0)).ravel()
        shared = (table.T @ scaled).toarray()
    second = np.diag(own) - shared
    # a hundredth of a token's wavering: an expert that nobody hesitates about moves, but not far
    second[np.diag_indices(experts)] += 1e-2 + 1e-9 * own.max(initial=0.0)
    step = -smoothing * cho_solve(cho_factor(second), point.gradient)
    return np.clip(step - step.mean(), -20.0 * smoothing, 20.0 * smoothing)


# ----------------------------------------------------------------------------------- whole tokens
#: Tokens by expert that a coordinate pass looks at: those with the smallest margins.
_NEAR = 32

#: Rounds of updates of a rule with groups: a quick fall of the step, on some of the tokens, and a
#: slow one from the best bias so far on all of them, where that is not enough.
_ROUNDS = (60, 60)

#: What a fall of the step begins and ends with, in first steps.
_FALLS = ((1.0, 1e-2), (3e-2, 1e-4))


def chosen_counts(
    biased: Float64[np.ndarray, "tokens experts"], top_k: int
) -> Int64[np.ndarray, "experts"]:
    """Tokens that choose each expert."""
    return hard_set(biased, top_k).sum(axis=0)


def unevenness(counts: Int64[np.ndarray, "experts"]) -> tuple[int, int]:
    """What a better bias makes smaller: the largest count, then the distance from even counts."""
    return int(counts.max()), int(np.abs(counts * len(counts) - counts.sum()).sum())


def settle_whole_tokens(
    scores: Float64[np.ndarray, "tokens experts"],
    bias: Float64[np.ndarray, "experts"],
    top_k: int,
    quota: float,
    num_contenders: int,
) -> Float64[np.ndarray, "experts"]:
    r"""Exact coordinate passes: the expert furthest from its quota gets exactly that many tokens.

    Expert e is chosen where :math:`q_{te} + b_e` exceeds the k-th largest of the others, so b_e
    between minus the n-th and the (n+1)-th largest of that difference gives it n tokens. Only the
    tokens with the smallest margins can change sides within such a step, so only they are looked
    at. Ends at counts that are the quota rounded, or after three passes' worth of steps. The bias
    with the smallest largest count that was met; ``bias`` itself when none is better.
    """
    experts = scores.shape[1]
    biased = scores + bias
    counts = chosen_counts(biased, top_k)
    last, following = last_and_next(biased, top_k)
    margin = last - following
    near = np.argsort(margin, kind="stable")[: _NEAR * experts]
    contending = contenders(scores[near], bias, num_contenders)
    value = contending.scores + bias[contending.expert]
    is_in = hard_set(value, top_k)
    settled = counts - np.bincount(contending.expert[is_in], minlength=experts)
    order = np.argsort(contending.expert, axis=None, kind="stable")
    ends = np.cumsum(np.bincount(contending.expert.ravel(), minlength=experts))
    of_expert = np.split(order, ends[:-1])
    least, most = int(np.floor(quota)), int(np.ceil(quota))
    moved, best, best_score = bias.copy(), bias, unevenness(counts)
    for _ in range(3 * experts + 20):
        excess = np.where(counts > most, counts - most, np.minimum(counts - least, 0))
        if not excess.any():
            break
        expert = int(np.abs(excess).argmax())
        token, slot = np.divmod(of_expert[expert], value.shape[1])
        others = value[token]
        own = others[np.arange(len(token)), slot].copy()
        others[np.arange(len(token)), slot] = -np.inf
        width = others.shape[1]
        lead = np.sort(own - np.partition(others, width - top_k, axis=1)[:, width - top_k])[::-1]
        count_there = (most if excess[expert] > 0 else least) - int(settled[expert])
        if not 0 < count_there < len(lead):
            break
        shift = -0.5 * (lead[count_there - 1] + lead[count_there])
        before = contending.expert[token][is_in[token]]
        value[token, slot] += shift
        moved[expert] += shift
        is_in[token] = hard_set(value[token], top_k)
        after = contending.expert[token][is_in[token]]
        counts += np.bincount(after, minlength=experts) - np.bincount(before, minlength=experts)
        if (score := unevenness(counts)) < best_score:
            best, best_score = moved.copy(), score
    return best


def balance_by_updates(
    counts_of: Sequence[Callable[[Float64[np.ndarray, "experts"]], Int64[np.ndarray, "experts"]]],
    starts: list[Float64[np.ndarray, "experts"]],
    step: float,
    enough: float = 0.0,
) -> Float64[np.ndarray, "experts"]:
    r"""The best bias met by loss-free updates with a falling step; a better one may exist.

    :math:`b_e \leftarrow b_e + \eta\, \mathrm{clip}(1 - c_e / m, -1, 1)`, less the mean, with
    :math:`\eta` falling geometrically from ``step`` to a ten-thousandth of it; c are the counts
    that the rule itself finds, first on some of the tokens, then on all. Begins from the start with
    the smallest largest count; ends early when MaxVio is ``enough`` or less. One way to count has
    the slow fall alone. Source of the update: arXiv 2408.15664, algorithm 1, there with the sign
    alone.
    """
    first = len(_ROUNDS) - len(counts_of)
    for count, rounds, fall in zip(counts_of, _ROUNDS[first:], _FALLS[first:], strict=True):
        best_score, number = min((unevenness(count(b)), number) for number, b in enumerate(starts))
        best = bias = starts[number]
        for step_now in step * np.geomspace(*fall, rounds):
            counts = count(bias)
            if (score := unevenness(counts)) < best_score:
                best, best_score = bias, score
            if counts.max() <= (1.0 + enough) * counts.mean():
                break
            bias = bias + step_now * np.clip(1.0 - counts / counts.mean(), -1.0, 1.0)
            bias = bias - bias.mean()
        starts = [*starts, best]
    return best


# ---------------------------------------------------------------------------------- balancing bias
#: Tokens of the first, coarse descent.
_COARSE_TOKENS = 2048

#: Experts beyond the chosen ones that a token keeps in view during the descent on all tokens, and
#: where whole tokens are settled.
_IN_VIEW, _IN_REACH = 16, 8

#: Smoothings of the descents, in spreads of the scores; the last one is set by the fair count.
_COARSE = (0.3, 0.1, 0.04)
_FINE = (0.012, 0.004)

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
    From a ``start`` near the optimum the descents on all are enough for what is tried on other
    tokens: nothing else is done, and nothing proved.

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
    if start is not None:
        return BalancingBias(smooth, chosen_counts(scores + smooth, top_k), None, None, None)
    exact = solve_program(q, smooth, top_k, reach=4.0 * smoothing)
    optimum = smooth if exact is None else exact.bias
    num_tied = None
    if exact is not None:
        num_tied = len(tied_tokens(q + optimum, top_k, _largest(q, optimum)))
    tried, counted = [], []
    for begin in (smooth, optimum):
        bias = settle_whole_tokens(q, begin, top_k, quota, top_k + _IN_REACH)
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


def rough_bias(
    scores: Float[np.ndarray, "tokens experts"], top_k: int
) -> Float64[np.ndarray, "experts"]:
    """A bias near the optimum of some 2,048 of the tokens, by descents alone."""
    part, experts = some_tokens(scores, _COARSE_TOKENS).astype(np.float64), scores.shape[1]
    part -= part.mean(axis=1, keepdims=True)
    # each expert by itself: the level that its fair share of the tokens exceeds
    bias, fair = -np.quantile(part, 1.0 - top_k / experts, axis=0), top_k * len(part) / experts
    spread, whole = float(np.sqrt((part**2).mean())), contenders(part, bias, experts)
    for smoothing in _COARSE:
        bias = minimise_smoothed(whole, bias, top_k, fair, spread * smoothing, 0.05 * fair)
    return bias - bias.mean()


def some_tokens(values: Shaped[np.ndarray, "tokens *any"], most: int) -> np.ndarray:
    """``most`` of the tokens, the same whatever the values; all where there are no more."""
    if len(values) <= most:
        return values
    return values[np.random.Generator(np.random.PCG64(0)).permutation(len(values))[:most]]


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
    last = spread * min(0.3 / quota, _FINE[-1])
    bias = rough_bias(q, top_k) if start is None else start
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
    duplicates = []
    for run in np.split(order, np.flatnonzero(~gaps) + 1):
        rest = sorted(run.tolist())
        while len(rest) > 1:
            first = scores[:, rest[0]].astype(np.float64)
            same = [e for e in rest if float(np.ptp(scores[:, e] - first)) <= allowed]
            rest = [e for e in rest if e not in same]
            if len(same) > 1:
                duplicates.append(tuple(same))
    return sorted(duplicates)


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
    last, following = last_and_next(biased, top_k)
    lead = biased - 0.5 * (following + last)[:, None]
    size = float(np.abs(scores).sum(axis=1).mean()) * tokens
    while True:
        # a token whose own border is wide keeps both neighbours open, however short the reach
        is_open = np.abs(lead) <= reach
        if is_open.sum() > MOST_OPEN:
            return None
        solution = _solve_open(lead, is_open, top_k, quota)
        if solution is not None:
            choice, multiplier = solution
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
    from scipy.sparse import csr_array

    is_settled = (lead > 0.0) & ~is_open
    token, expert = np.nonzero(is_open)
    named, row = np.unique(token, return_inverse=True)
    places = top_k - is_settled.sum(axis=1)
    if (np.delete(places, named) != 0).any():
        return None
    left_over = quota - is_settled.sum(axis=0)
    rows = np.concatenate([row, len(named) + expert])
    columns = np.tile(np.arange(len(token)), 2)
    shape = (len(named) + lead.shape[1], len(token))
    table = csr_array((np.ones(len(rows)), (rows, columns)), shape=shape)
    if (np.asarray(table.sum(axis=1)).ravel() == 0)[len(named) :].any():
        return None  # an expert without open choices has no multiplier
    ends = np.concatenate([places[named].astype(np.float64), left_over])
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
    if top_k == biased.shape[1]:
        return np.empty(0, dtype=np.int64)
    last, following = last_and_next(biased, top_k)
    return np.flatnonzero(last - following <= tolerance)


# --------------------------------------------------------------------------- on other documents too
#: First step of the updates of a rule with groups, in spreads of the selection scores.
_FIRST_STEP = 0.2

#: Where they end: this share of the MaxVio that even routing shows by chance (docs/theory.md D3).
_OF_FLOOR = 0.1

Bias = Float64[np.ndarray, "experts"]
Rows = Bool[np.ndarray, "tokens"]
Places = Integer[np.ndarray, "some"]
Mask = Bool[np.ndarray, "some experts"]


@dataclass(frozen=True, eq=False)
class TokensAtRule:
    """Some tokens and what a rule makes of them.

    ``scores`` are the selection scores before any mask, ``weights`` those of the ``chosen``
    experts, ``unit`` is the document of each token and ``half`` the half of the documents, 0 or 1.
    ``rule`` says which experts are chosen by scores with a bias, of either precision.
    """

    scores: Float[np.ndarray, "tokens experts"]
    chosen: Int32[np.ndarray, "tokens k"]
    weights: Float64[np.ndarray, "tokens k"]
    unit: Int64[np.ndarray, "tokens"]
    half: Int32[np.ndarray, "tokens"]
    rule: Callable[[Float[np.ndarray, "some experts"]], Int32[np.ndarray, "some k"]]

    def choose(self, bias: Bias, rows: Rows | slice = slice(None)) -> Mask:
        """What is chosen with a bias, of all tokens or of some."""
        return chosen_mask(self.rule(self.scores[rows] + bias), self.scores.shape[1])

    def counter(self, rows: Places) -> Callable[[Bias], Int64[np.ndarray, "experts"]]:
        """Tokens of some that choose each expert with a bias, in float32, as engines add it."""
        scores, experts = self.scores[rows].astype(np.float32), self.scores.shape[1]
        return lambda bias: np.bincount(
            self.rule(scores + bias.astype(np.float32)).ravel(), minlength=experts
        )

    @property
    def halves(self) -> list[tuple[Rows, Rows]]:
        """Each half of the documents with the other one; none where one is empty."""
        first, second = (self.half == number for number in (0, 1))
        return [(first, second), (second, first)] if first.any() and second.any() else []

    def loads(self, is_chosen: Mask, rows: Rows | slice = slice(None)) -> load.Scatter:
        """How the loads of these choices came about, document by document."""
        return load.scatter(load.unit_counts(is_chosen, self.unit[rows]))

    def weight_moved(self, is_after: Mask) -> float:
        """The share of the routing weight on experts no longer chosen, mean over tokens."""
        is_lost = ~np.take_along_axis(is_after, self.chosen.astype(np.int64), axis=1)
        total = self.weights.sum(axis=1)
        moved = (self.weights * is_lost).sum(axis=1)
        return float(np.divide(moved, total, np.zeros_like(total), where=total > 0.0).mean())


@dataclass(frozen=True)
class Loads:
    """How even the loads are: MaxVio and CV (ddof 0), over all tokens in question."""

    max_vio: float
    cv: float

    @classmethod
    def of(cls, loads: load.Scatter) -> Loads:
        return cls(float(loads.load.max() - 1.0), float(loads.load.std()))


@dataclass(frozen=True)
class HeldOut:
    """The tokens of one half of the documents with the bias that was made on the other half.

    ``limit`` is the MaxVio that even routing stays below on such documents, at the level of the
    whole run; it holds the chance of both halves. The floors are those of as many independent
    tokens (docs/theory.md D3), without that of the half that the bias was made on. ``reduction`` is
    by how much the squared CV of the expected load fell, ``reduction_p`` the probability of that by
    chance.
    """

    num_tokens: int
    num_units: int
    before: Loads
    after: Loads
    limit: float
    cv_floor: float
    max_vio_floor: float
    reduction: float | None
    reduction_p: float

    @property
    def is_within(self) -> bool:
        return self.after.max_vio <= self.limit


@dataclass(frozen=True)
class Centring:
    """Scores with their mean over tokens taken away, so that the mean input favours no expert.

    ``change`` is added to the selection scores, mean 0. ``other_documents`` is the MaxVio of each
    half of the documents with the change that the other half gives: the worse one; None with one
    unit. ``effective_sets`` is one over the share of pairs of tokens with one expert set, None
    where hardly any pair shares one. ``weight_moved`` is the share of the routing weight on experts
    that are no longer chosen.
    """

    change: tuple[float, ...]
    max_vio: float
    other_documents: float | None
    effective_sets: float | None
    weight_moved: float


def centring(routed: TokensAtRule) -> Centring:
    """The mean of each expert's score taken away, on all tokens and on each half by the other."""

    def change(rows: Rows | slice) -> Bias:
        mean = routed.scores[rows].astype(np.float64).mean(axis=0)
        return mean.mean() - mean

    whole = change(slice(None))
    is_after = routed.choose(whole)
    experts, k = routed.scores.shape[1], routed.chosen.shape[1]
    keys = expert_set_key(np.nonzero(is_after)[1].reshape(-1, k), experts)
    equal, pairs = load.pairs_of_equals(np.unique(keys, return_counts=True)[1])
    tried = [
        float(load.max_vio(routed.choose(change(there), here).sum(axis=0)))
        for here, there in routed.halves
    ]
    return Centring(
        change=tuple(whole.tolist()),
        max_vio=float(load.max_vio(is_after.sum(axis=0))),
        other_documents=max(tried, default=None),
        effective_sets=pairs / equal if equal >= load.LEAST_PAIRS else None,
        weight_moved=routed.weight_moved(is_after),
    )


def evening_bias(
    routed: TokensAtRule, has_groups: bool, rows: Rows | None = None, start: Bias | None = None
) -> tuple[Bias, int | None, float | None]:
    """The bias that evens all tokens or some, and without groups the tied ones and the gap of the
    program, as :func:`balancing_bias`; with groups :func:`balance_by_updates` on the rule itself.
    """
    scores = routed.scores if rows is None else routed.scores[rows]
    k = routed.chosen.shape[1]
    if not has_groups:
        solution = balancing_bias(scores, k, start)
        return solution.bias, solution.num_tied, solution.gap
    every = np.arange(len(routed.scores)) if rows is None else np.flatnonzero(rows)
    starts, parts = [np.zeros(scores.shape[1])], [every]
    if start is not None:
        starts.append(start)
    else:
        parts = [some_tokens(every, 2 * _COARSE_TOKENS), every]
        if k < scores.shape[1] and np.ptp(scores):
            starts.append(rough_bias(scores, k))
    counts_of = [routed.counter(part) for part in parts]
    floor = load.max_vio_floor(len(scores), scores.shape[1], k)
    step = _FIRST_STEP * score_spread(routed.scores)
    return balance_by_updates(counts_of, starts, step, _OF_FLOOR * floor), None, None


def held_out(
    routed: TokensAtRule, has_groups: bool, change: Bias, level: float, seed: int
) -> tuple[HeldOut, ...]:
    """Each half of the documents with the bias that evens the other; ``change`` is that of all.

    Nothing where a half is empty. ``level`` is the probability with which even routing may be above
    a limit.
    """
    results = []
    for here, there in routed.halves:
        bias = evening_bias(routed, has_groups, there, change)[0]
        is_before = chosen_mask(routed.chosen[here], routed.scores.shape[1])
        before = routed.loads(is_before, here)
        after, made_on = (routed.loads(routed.choose(bias, r), r) for r in (here, there))
        reduction, probability = load.cv_squared_reduction(before, after)
        size = int(here.sum()), is_before.shape[1], routed.chosen.shape[1]
        results.append(
            HeldOut(
                num_tokens=size[0],
                num_units=after.num_units,
                before=Loads.of(before),
                after=Loads.of(after),
                # both halves must stay below: each has half of the level
                limit=load.max_vio_limit([after, made_on], level / 2.0, seed),
                cv_floor=load.load_cv_floor(*size),
                max_vio_floor=load.max_vio_floor(*size),
                reduction=reduction if np.isfinite(reduction) else None,
                reduction_p=probability,
            )
        )
    return tuple(results)
