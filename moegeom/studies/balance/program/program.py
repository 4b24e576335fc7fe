"""The linear program of balancing, cut down to the choices that are open near its solution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64
from scipy.sparse import csr_array

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
