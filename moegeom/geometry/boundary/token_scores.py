"""Selection scores of one token, with their derivatives in the router input and bounds of both."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from moegeom.geometry.boundary.curved_rows import CurvedRows
from moegeom.geometry.selection.logit_map import mapped_logits
from moegeom.geometry.selection.score import SCORES, sigmoid

#: Share of the squared terms of a gradient that their rounding may cancel to.
_ROUNDING = 1e-14
#: Halvings of the distance within which a bend is bounded.
BISECTIONS = 8
#: The pair (expert out, expert in) of something that is no swap, or is not known.
NO_PAIR = (-1, -1)


@dataclass(frozen=True)
class Constraint:
    """A signed sum of selection scores that must fall by ``gap`` before a choice can change.

    The sum is that of ``signs`` times scores of ``experts``. ``pair`` are the experts that swap
    where it falls to zero, (-1, -1) if that is not known.
    """

    experts: tuple[int, ...]
    signs: tuple[float, ...]
    gap: float
    pair: tuple[int, int] = NO_PAIR


@dataclass(frozen=True, eq=False)
class Direction:
    """A way through the router input: ``logits`` is how they change per unit of its length."""

    logits: Float64[np.ndarray, "experts"]
    slope: float


@dataclass(frozen=True, eq=False)
class TokenScores:
    r"""Selection scores q, where :math:`\nabla q_e = s_e (w_e - \bar w)`.

    ``slope`` is s: the slope of the score, or the probability p for softmax. ``odds`` is the logit
    that the score is the curve of: for softmax :math:`\log p_e / (1 - p_e)`, whose gradient is
    :math:`w_e` less a mean of the other rows, no longer than ``CurvedRows.widest``.
    :math:`\bar w = \sum_a p_a w_a` for softmax, else 0, is known by its products with the rows and
    with itself.
    """

    rows: CurvedRows
    q: Float64[np.ndarray, "experts"]
    slope: Float64[np.ndarray, "experts"]
    odds: Float64[np.ndarray, "experts"]
    mean_products: Float64[np.ndarray, "experts"]
    mean_square: float

    def within(
        self, radius: float
    ) -> tuple[Float64[np.ndarray, "experts"], Float64[np.ndarray, "experts"]]:
        """Least and largest selection score of each expert within a distance."""
        rows = self.rows
        if rows.curve is None:
            reach = radius * rows.widest
            low, high = sigmoid(np.stack([self.odds - reach, self.odds + reach]))
            return low + rows.bias, high + rows.bias
        reach = radius * rows.length
        score = SCORES[rows.rule.score]
        low, high = (
            score(mapped_logits(z[None], rows.cap))[0] + rows.bias
            for z in (self.odds - reach, self.odds + reach)
        )
        return low, high

    def bend(self, constraint: Constraint, radius: float) -> float:
        r"""Bound of how fast the slope of a constraint falls along any line, within a distance.

        One logit: :math:`|f''| |w|^2` for each expert. Softmax:
        :math:`p'' = p (((w - \bar w) \cdot x)^2 - \mathrm{Var}_p(w \cdot x))`, where the variance
        is at most a quarter of :math:`D^2`, the widest row distance squared, and that mean moves
        by no more than :math:`r D^2 / 4`. Of the two, one lowers what is added, the other what is
        subtracted.
        """
        rows, experts = self.rows, np.array(constraint.experts)
        if rows.curve is not None:
            return float((rows.curve.bends.bend * rows.length[experts] ** 2).sum())
        odds = self.odds[experts] + radius * rows.widest[experts]
        largest = sigmoid(odds[None])[0]
        variance = float(rows.widest.max()) ** 2 / 4.0
        own = rows.gram[experts, experts]
        squared = np.maximum(own - 2.0 * self.mean_products[experts] + self.mean_square, 0.0)
        from_mean = np.sqrt(squared + _ROUNDING * own) + radius * variance
        rising = np.minimum(from_mean, rows.widest[experts]) ** 2
        falls = np.where(np.array(constraint.signs) > 0.0, variance, rising)
        return float((largest * falls).sum())

    def direction(self, constraint: Constraint, of_logits: bool = False) -> Direction:
        """Steepest descent of a constraint, or of the same sum of logits; slope 0 without any."""
        experts = np.array(constraint.experts)
        weight = np.array(constraint.signs) * (1.0 if of_logits else self.slope[experts])
        excess = 0.0 if self.rows.curve is not None else float(weight.sum())
        products = self.rows.gram[:, experts] @ weight - excess * self.mean_products
        own = self.rows.gram[experts, experts] @ weight**2
        squared = weight @ products[experts]
        squared -= excess * (weight @ self.mean_products[experts] - excess * self.mean_square)
        slope = math.sqrt(max(float(squared), 0.0) + _ROUNDING * float(own))
        return Direction(-products / slope if slope > 0.0 else products, slope)

    def reach_of(self, constraint: Constraint, slope: float, radius: float) -> float:
        r"""No input within this distance breaks the constraint; at most ``radius``.

        :math:`C(x) \ge C_0 - n r - H r^2 / 2` with the slope n here and H the bend within r, and
        the largest r for which this stays positive, by bisection; and, for softmax, a slope of at
        most half of the widest row distance everywhere.
        """
        reach = min(self._root(constraint, slope, radius), radius)
        if self.rows.curve is not None:
            return reach
        high = radius
        for _ in range(BISECTIONS if reach < radius else 0):
            middle = (reach + high) / 2.0
            root = self._root(constraint, slope, middle)
            if root >= middle:
                reach = middle
            else:  # the bound within a larger distance holds within a smaller one
                reach, high = max(reach, root), middle
        widest = float(self.rows.widest.max())
        return max(reach, 2.0 * constraint.gap / widest) if widest > 0.0 else reach

    def _root(self, constraint: Constraint, slope: float, radius: float) -> float:
        """Where the quadratic bound that holds within ``radius`` ends."""
        bend = self.bend(constraint, radius)
        root = slope + math.sqrt(slope * slope + 2.0 * bend * constraint.gap)
        return 2.0 * constraint.gap / root if root > 0.0 else math.inf


def token_scores(z: Float64[np.ndarray, "experts"], rows: CurvedRows) -> TokenScores:
    """Scores of one token from logits that are multiplied already."""
    if rows.curve is not None:
        q = SCORES[rows.rule.score](mapped_logits(z[None], rows.cap))[0] + rows.bias
        slope = np.array([rows.curve.at(float(logit)).slope for logit in z])
        return TokenScores(rows, q, slope, z, np.zeros(len(z)), 0.0)
    shifted = z - z.max()
    powers = np.exp(shifted)
    total = powers.sum()
    largest = int(np.argmax(z))
    others = total - powers
    others[largest] = powers[:largest].sum() + powers[largest + 1 :].sum()
    p = powers / total
    with np.errstate(divide="ignore"):
        odds = shifted - np.log(others)
    products = rows.gram @ p
    return TokenScores(rows, p + rows.bias, p, odds, products, float(p @ products))
