"""How far every logit must move at most until n + 1 experts tie at the border."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

from moegeom.geometry.boundary.order_search import (
    Experts,
    Flat,
    NearestOrder,
    OrderDistance,
    search_ties,
)
from moegeom.geometry.boundary.orders import tie_spread
from moegeom.geometry.gram.spectrum import RANK_TOLERANCE

#: Difference of logits, relative to their range, that counts as a tie: what the solver promises.
_TIE = 1e-6

MOST_NODES = 2_000

#: Answers of scipy.optimize.linprog.
_SOLVED, _INFEASIBLE = 0, 2


def free_logit_distance(
    selection: Float[np.ndarray, "tokens experts"], k: int, order: int
) -> Float64[np.ndarray, "tokens"]:
    r"""Least :math:`\max_e |z_e - z'_e|` over logits z' with a tie of order n: half the tie spread.

    Any z' is some input's when the rows are linearly independent; otherwise a lower bound, from
    which :func:`logit_distance` may be far. In logits; inf for k = E and n >= E.
    Source: docs/theory.md A5 (S0 Definition 4.6). Oracle in tests: linear programs.
    """
    return tie_spread(selection, k, order) / 2.0


def logit_distance(
    logits: Float64[np.ndarray, "experts"],
    weight: Float[np.ndarray, "experts hidden"],
    k: int,
    order: int,
    most_nodes: int = MOST_NODES,
) -> OrderDistance:
    r"""Least :math:`\max_e |z_e(y) - z_e(y')|` over inputs y' with a tie of order n, as a bracket.

    For one input of an affine rule, in logits; inf as in :func:`free_logit_distance` and where the
    rows allow no tie. Half the tie spread, without experts named, when the rows are independent;
    else linear programs over ties and sides, up to ``most_nodes`` steps, with an error of 1e-6 of
    the range of the logits.
    Source: docs/theory.md A5 (S0 Definition 4.6). Oracle in tests: a program for every split.
    """
    left, values, _ = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
    basis = left[:, values > RANK_TOLERANCE * values.max(initial=0.0)]
    if basis.shape[1] == len(logits):
        spread = float(free_logit_distance(logits[None], k, order)[0])
        return OrderDistance(spread, spread, ())
    unit = float(np.ptp(logits)) or 1.0
    found = search_ties(_Supremum(logits / unit, basis, _TIE), logits / unit, k, order, most_nodes)
    return OrderDistance(found.lower * unit, found.upper * unit, found.tied)


@dataclass(frozen=True, eq=False)
class _Supremum:
    """Logits of range 1; ``basis`` spans the changes of logits that inputs can make."""

    logits: Float64[np.ndarray, "experts"]
    basis: Float64[np.ndarray, "experts rank"]
    slack: float

    def flat(self, tied: Experts) -> Flat:
        is_single = len(tied) == 1
        nearest = NearestOrder(0.0, 0.0, self.logits) if is_single else self.nearest(tied, (), ())
        own = self.logits[list(tied)]
        spread = np.maximum(own.max(), self.logits) - np.minimum(own.min(), self.logits)
        return Flat(nearest, np.maximum(spread / 2.0, nearest.bound))

    def nearest(self, tied: Experts, above: Experts, below: Experts) -> NearestOrder:
        """min t with -t <= (B a)_e <= t, a the coordinates of the change."""
        from scipy.optimize import linprog

        experts, rank = self.basis.shape
        reach = np.ones((experts, 1))
        sign = np.repeat([1.0, -1.0], [len(above), len(below)])
        others = [*above, *below]
        first = tied[0]
        rise, gaps = self.basis - self.basis[first], self.logits - self.logits[first]
        sides = np.hstack([-sign[:, None] * rise[others], np.zeros((len(others), 1))])
        same = list(tied[1:])
        ties = np.hstack([rise[same], np.zeros((len(same), 1))])
        found = linprog(
            np.append(np.zeros(rank), 1.0),
            A_ub=np.vstack(
                [np.hstack([self.basis, -reach]), np.hstack([-self.basis, -reach]), sides]
            ),
            b_ub=np.concatenate([np.zeros(2 * experts), sign * gaps[others]]),
            A_eq=ties if same else None,
            b_eq=-gaps[same] if same else None,
            bounds=(None, None),
            method="highs",
        )
        if found.status == _INFEASIBLE:
            return NearestOrder(np.inf, np.inf, self.logits)
        if found.status != _SOLVED:
            return NearestOrder(0.0, np.inf, self.logits)
        return NearestOrder(found.fun, found.fun, self.logits + self.basis @ found.x[:-1])
