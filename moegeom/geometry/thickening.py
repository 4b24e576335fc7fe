r"""Measure of the points of a ball near ties, and logits of such points.

Shares are of a ball of radius R. :math:`\binom{D/2}{n/2} = \Gamma(D/2+1) / (\Gamma(n/2+1)\,
\Gamma((D-n)/2+1))` throughout, by logarithms, so that D = 7168 is no further than D = 3.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64

from moegeom.geometry.gram import symmetric_root


def log_half_binomial(dimension: int, order: int) -> float:
    r""":math:`\ln \binom{D/2}{n/2}` for 0 <= n <= D; oracle in tests: mpmath."""
    half, part = dimension / 2.0, order / 2.0
    return math.lgamma(half + 1.0) - math.lgamma(part + 1.0) - math.lgamma(half - part + 1.0)


def log_order_bound(num_experts: int, order: int, dimension: int, width: float) -> float:
    r"""Logarithm of a bound of the share within a ``width`` of ties of order n, of any router.

    :math:`\binom{E}{n+1} \binom{D/2}{n/2} (\epsilon / R)^n`, ``width`` in units of the radius:
    every tie of n + 1 experts is a flat, and a flat through the centre has the largest tube. There
    are :math:`\binom{E}{n+1}` flats. Not cut at 0: above it says nothing. -inf where fewer experts
    are than tie. Source: docs/theory.md A7; oracle in tests: mpmath, and shares measured.
    """
    if order + 1 > num_experts:
        return -math.inf
    flats = math.log(math.comb(num_experts, order + 1))
    return flats + log_half_binomial(dimension, order) + order * math.log(width)


def ball_logits(
    rows: Float64[np.ndarray, "experts hidden"],
    bias: Float64[np.ndarray, "experts"],
    radius: float,
    tokens: int,
    random: np.random.Generator,
    is_sphere: bool = False,
) -> Float64[np.ndarray, "tokens experts"]:
    r"""Logits of uniform points of the ball of this radius around 0, without drawing its points.

    :math:`z = b + L u` with :math:`L L^\top = W W^\top` and :math:`u = r g / \sqrt{|g|^2 +
    \chi^2}`, g standard normal of the rank's dimension, :math:`\chi^2` with the D - E degrees of
    freedom that the rows do not see, :math:`r = R U^{1/D}`; of the sphere alone r = R. Around
    another centre c the bias is b + W c. Exact in law at any D. For no fewer experts than
    dimensions the points themselves are drawn. Source: docs/theory.md A7; oracle in tests: uniform
    points of the ball.
    """
    experts, hidden = rows.shape
    root = rows
    if experts < hidden:
        root = symmetric_root(rows @ rows.T)
    seen = random.standard_normal((tokens, root.shape[1]))
    square = (seen**2).sum(axis=1)
    if experts < hidden:
        square = square + random.chisquare(hidden - experts, tokens)
    length = radius * (np.ones(tokens) if is_sphere else random.random(tokens) ** (1.0 / hidden))
    return bias + (length / np.sqrt(square))[:, None] * (seen @ root.T)
