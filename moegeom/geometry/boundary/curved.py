"""What the distances of curved and grouped rules need of a router, computed once.

A curve of scores is a score behind an optional soft cap, ``z -> s(cap * tanh(z / cap))``; a
multiplier is folded into logits and rows before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from moegeom.core.errors import RouterRuleError
from moegeom.core.router import GroupMask, LogitMap, Rule
from moegeom.core.shapes import Float, Float64
from moegeom.geometry.boundary.linear import RowDistances, row_distances


# ------------------------------------------------------------------------------------------- curves
@dataclass(frozen=True)
class Bends:
    """Range of a score s, without a cap, and bounds of its derivatives.

    ``steepest`` is the largest slope s' and ``peak`` where it is; ``log_slope`` bounds
    ``|s'' / s'|`` and ``bend`` bounds ``|s''|``. Up to ``convex_until`` the function 1 / s' is
    convex, so that the slope of a boundary is monotone
    (:mod:`moegeom.kernels.cpu.curved_boundaries`).
    """

    low: float
    high: float
    steepest: float
    peak: float
    log_slope: float
    bend: float
    convex_until: float


#: Upper over lower bound of a distance that is known as well as floats know it: the bracket of a
#: curved boundary is closed to 1e-6.
POINT = 1.0 + 2e-6

#: Extrema by high-precision root finding; sigmoid: s'' = s'(1 - 2 s), largest at (3 +- 3^0.5) / 6.
BENDS: dict[str, Bends] = {
    "identity": Bends(-math.inf, math.inf, 1.0, 0.0, 0.0, 0.0, math.inf),
    "sigmoid": Bends(0.0, 1.0, 0.25, 0.0, 1.0, 0.09622504487, math.inf),
    "sqrt_softplus": Bends(
        0.0, math.inf, 0.3190863433, 0.9214225086553604, 0.5, 0.07452048867, 4.1107
    ),
}


@dataclass(frozen=True)
class ScoreCurve:
    """A score of ``BENDS`` behind a soft cap; ``soft_cap`` is inf without one."""

    score: str
    soft_cap: float = math.inf

    @property
    def bends(self) -> Bends:
        """Bounds for the whole curve; a cap flattens, and bends by itself.

        With t = c tanh(z/c): t' <= 1, |t'' / t'| <= 2/c, |t''| <= 4 / (27^(1/2) c). 1 / f' stays
        convex behind a cap for the identity (cosh^2) and the sigmoid: its derivative is
        2 sinh t + (2 + 2 cosh t) sinh(2z/c) / c, increasing in z.
        """
        own = BENDS[self.score]
        c = self.soft_cap
        if math.isinf(c):
            return own
        return replace(
            own,
            log_slope=own.log_slope + 2.0 / c,
            bend=own.bend + own.steepest * 0.7698003590 / c,
            convex_until=own.convex_until if math.isinf(own.convex_until) else -math.inf,
        )


# --------------------------------------------------------------------------------------------- rows
#: A row is parallel to another when it leaves its line by less than this share of its length.
_PARALLEL = 1e-12


@dataclass(frozen=True, eq=False)
class CurvedRows:
    """A selection rule and the lengths and angles of its rows.

    Rows are multiplied by ``multiplier``, as logits have to be, so that all distances are in units
    of the router input. ``curve`` is None for softmax scores, whose rows have their mean taken off
    in ``gram``: a common shift changes no softmax. ``across[i, j]`` is the length of what row j has
    across row i, 0 where they are parallel or row i is zero; ``widest[i]`` the largest distance of
    row i to another one. ``group_slopes[g, h]`` is the largest slope of the difference of two group
    scores; it has no row without groups.
    """

    rule: Rule
    curve: ScoreCurve | None
    multiplier: float
    bias: Float64[np.ndarray, "experts"]
    length: Float64[np.ndarray, "experts"]
    gram: Float64[np.ndarray, "experts experts"]
    across: Float64[np.ndarray, "experts experts"]
    distances: RowDistances
    widest: Float64[np.ndarray, "experts"]
    group_slopes: Float64[np.ndarray, "groups groups"]

    @property
    def groups(self) -> GroupMask | None:
        return self.rule.groups

    @property
    def num_experts(self) -> int:
        return len(self.bias)


def curved_rows(
    weight: Float[np.ndarray, "experts hidden"],
    rule: Rule,
    logit_bias: Float[np.ndarray, "experts"] | None = None,
    selection_bias: Float[np.ndarray, "experts"] | None = None,
) -> CurvedRows:
    """The rows of a router made ready for :mod:`moegeom.kernels.cpu.curved_distance`.

    Softmax scores that nothing is added to order as their logits do, and so do group maxima of
    them: such a rule is taken as one of logits, masked with -inf, which all scores are above.

    Raises
    ------
    RouterRuleError
        For softmax scores of soft-capped logits with a selection bias or groups: no bound is known.
    """
    capped = rule.logit_map if rule.logit_map is not None else LogitMap()
    rule = as_logits(rule) if selection_bias is None or not selection_bias.any() else rule
    if rule.score == "softmax" and np.isfinite(capped.soft_cap):
        raise RouterRuleError(
            "softmax scores of soft-capped logits are compared with a bias or in groups; expected "
            "a score whose boundaries have a known distance.",
            "Other quantities of this router can be measured.",
        )
    rows = weight.astype(np.float64) * capped.multiplier
    curve = None if rule.score == "softmax" else ScoreCurve(rule.score, float(capped.soft_cap))
    distances = row_distances(rows, logit_bias)
    if curve is None:
        rows = rows - rows.mean(axis=0)
    gram = rows @ rows.T
    length = np.sqrt((rows**2).sum(axis=1))
    steepest = 0.0 if curve is None else curve.bends.steepest
    with np.errstate(divide="ignore"):
        apart = np.where(distances.inverse > 0.0, 1.0 / distances.inverse, 0.0)
    np.fill_diagonal(apart, 0.0)
    return CurvedRows(
        rule=rule,
        curve=curve,
        multiplier=capped.multiplier,
        bias=np.zeros(len(rows)) if selection_bias is None else selection_bias.astype(np.float64),
        length=length,
        gram=gram,
        across=_across(rows, gram, length),
        distances=distances,
        widest=apart.max(axis=1),
        group_slopes=group_slopes(gram, rule.groups, steepest, float(apart.max())),
    )


def as_logits(rule: Rule) -> Rule:
    """The rule of logits that chooses as unbiased scores do, where there is one."""
    groups = rule.groups
    if rule.score != "softmax" or groups is None or groups.score != "max" or groups.fill > 0.0:
        return rule
    return replace(rule, score="identity", groups=replace(groups, fill=-np.inf))


def _across(
    rows: Float64[np.ndarray, "experts hidden"],
    gram: Float64[np.ndarray, "experts experts"],
    length: Float64[np.ndarray, "experts"],
) -> Float64[np.ndarray, "experts experts"]:
    """Length of row j across row i; from the rows themselves where the difference cancels."""
    squares = length**2
    share = np.divide(gram, squares[:, None], out=np.zeros_like(gram), where=squares[:, None] > 0)
    squared = np.maximum(squares[None, :] - share * gram, 0.0)
    for i in np.flatnonzero(squares > 0):
        near = np.flatnonzero(squared[i] <= 1e-8 * squares)
        residual = rows[near] - share[i, near, None] * rows[i]
        squared[i, near] = (residual**2).sum(axis=1)
    across = np.sqrt(squared)
    across[across <= _PARALLEL * length[None, :]] = 0.0
    across[length == 0.0] = 0.0
    return across


#: Sets of experts of one group up to which all vertices are looked at: groups of 64.
MOST_SETS = 2100


def group_slopes(
    gram: Float64[np.ndarray, "experts experts"],
    groups: GroupMask | None,
    steepest: float,
    widest: float,
) -> Float64[np.ndarray, "groups groups"]:
    r"""Largest slope of :math:`T_g - T_h`, a bound for every input.

    For scores of one logit, :math:`L_{gh} = s \max |\sum_{p} w - \sum_{p'} w|` over sets
    :math:`p \subset g, p' \subset h` of at most as many experts as a group score adds, the empty
    set among them, and s the steepest slope: coefficients between 0 and s have their largest norm
    at a vertex. In larger groups, twice the largest row or row difference stands in for it. For
    softmax (``steepest`` 0), :math:`T_g - T_h` is a mean of numbers -1, 0, 1 under
    p, and its slope a covariance with logits: at most half of the ``widest`` row distance.

    No rows without groups. Source: docs/theory.md E2 and E1b. Oracle in tests: all vertices in
    turn.
    """
    if groups is None:
        return np.empty((0, 0))
    number = groups.num_groups
    if steepest == 0.0:
        return np.full((number, number), widest / 2.0)
    size = len(gram) // number
    takes = 2 if groups.score == "top2_sum" and size > 1 else 1
    if size * (size + 1) // 2 >= MOST_SETS and takes == 2:
        longest = np.sqrt(np.diag(gram).max())
        return np.full((number, number), 2.0 * steepest * max(widest, longest))
    sets = _subsets(size, takes)
    out = np.zeros((number, number))
    blocks = gram.reshape(number, size, number, size)
    turned = -2.0 * sets.T.copy()
    own = [blocks[g, :, g].copy() for g in range(number)]
    squares = np.stack([((sets @ block) * sets).sum(axis=1) for block in own])
    for g in range(number):
        for h in range(g):
            squared = (sets @ blocks[g, :, h].copy()) @ turned
            squared += squares[g][:, None]
            squared += squares[h][None, :]
            out[g, h] = out[h, g] = steepest * np.sqrt(max(squared.max(), 0.0))
    return out


def _subsets(size: int, most: int) -> Float64[np.ndarray, "sets size"]:
    """Indicator rows of all sets of at most ``most`` (1 or 2) members."""
    single = np.eye(size)
    first, second = np.triu_indices(size, 1)
    pairs = single[first] + single[second] if most == 2 else np.empty((0, size))
    return np.concatenate([np.zeros((1, size)), single, pairs])
