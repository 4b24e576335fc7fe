"""Oracle: the boundary of two experts as a function of one logit, for every pair of a large router."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import expit, logit

from moegeom.core.router import LogitMap, Rule, Weights
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.geometry.selection import route
from moegeom.kernels.cpu.curved_distance import curved_distance

TOKENS = 3
#: Score and its inverse; nan or inf where no logit has that score.
SCORES = {
    "identity": (lambda z: z, lambda s: s),
    "sigmoid": (expit, logit),
    "sqrt_softplus": (
        lambda z: np.sqrt(np.logaddexp(0.0, z)),
        lambda s: np.where(s > 0.0, np.log(np.expm1(s * s)), -np.inf),
    ),
}
#: Score, soft cap, experts, experts per token, spread of the selection biases.
ROUTERS = [
    ("sigmoid", math.inf, 64, 8, 0.2),
    ("sigmoid", math.inf, 256, 8, 0.05),
    ("sigmoid", 4.0, 64, 6, 0.2),
    ("sqrt_softplus", math.inf, 64, 6, 0.3),
    ("sqrt_softplus", 3.0, 64, 6, 0.3),
    ("identity", 3.0, 64, 8, 0.3),
]


class Boundaries:
    """All boundaries between chosen and other experts, as the square of the distance by one logit."""

    def __init__(self, weight, bias, score, cap, z, chosen) -> None:
        out = np.setdiff1d(np.arange(len(z)), chosen)
        self.i, self.j = (a.ravel() for a in np.meshgrid(chosen, out, indexing="ij"))
        self.u, self.v, self.delta = z[self.i], z[self.j], bias[self.i] - bias[self.j]
        gram = weight @ weight.T
        kii, kjj, kij = gram[self.i, self.i], gram[self.j, self.j], gram[self.i, self.j]
        det = kii * kjj - kij**2
        self.inverse = kjj / det, -kij / det, kii / det
        self.score, self.score_inverse = SCORES[score]
        self.cap = cap

    def square(self, there, pair=slice(None)):
        """(du, dv) K^-1 (du, dv)' with f(v') = f(u') + delta; inf where there is no v'."""
        a, b, c = (part[pair] for part in self.inverse)
        capped = there if math.isinf(self.cap) else self.cap * np.tanh(there / self.cap)
        with np.errstate(all="ignore"):
            other = self.score_inverse(self.score(capped) + self.delta[pair])
            if math.isfinite(self.cap):
                other = self.cap * np.arctanh(other / self.cap)
            du, dv = there - self.u[pair], other - self.v[pair]
            return np.nan_to_num(a * du * du + 2.0 * b * du * dv + c * dv * dv, nan=np.inf)

    def nearest(self):
        """Distance and pair: the best of a grid of logits, then a minimum beside it."""
        steps = np.linspace(-6.0, 6.0, 1201)
        grid = self.square(self.u + steps[:, None])
        best = math.inf, -1, -1
        for pair in np.argsort(grid.min(axis=0))[:5]:
            near = self.u[pair] + steps[grid[:, pair].argmin()]
            found = minimize_scalar(
                lambda there, pair=pair: self.square(there, pair),
                bounds=(near - 0.02, near + 0.02),
                method="bounded",
                options={"xatol": 1e-12},
            )
            best = min(best, (math.sqrt(found.fun), self.i[pair], self.j[pair]))
        return best


@pytest.mark.parametrize(("score", "cap", "experts", "k", "spread"), ROUTERS)
def test_the_distance_is_the_least_over_all_boundaries(score, cap, experts, k, spread):
    random = np.random.default_rng([experts, k])
    weight = random.standard_normal((experts, 12)) / 2.0
    bias = spread * random.standard_normal(experts)
    rule = Rule(k, score, Weights("scores"), True, logit_map=LogitMap(1.0, cap))
    logits = random.standard_normal((TOKENS, 12)) @ weight.T
    chosen = route(logits, rule, bias).chosen
    lower, upper, pair = curved_distance(logits, chosen, curved_rows(weight, rule, None, bias))
    for token in range(TOKENS):
        expected = Boundaries(weight, bias, score, cap, logits[token], chosen[token]).nearest()
        assert lower[token] <= expected[0] * (1.0 + 1e-9)
        np.testing.assert_allclose(upper[token], expected[0], rtol=2e-6)
        np.testing.assert_array_equal(pair[token], expected[1:])
