r"""Measure of the points near a boundary: slabs, tubes of higher codimension, whole routers.

Shares are of a ball of radius R. :math:`\binom{D/2}{n/2} = \Gamma(D/2+1) / (\Gamma(n/2+1)\,
\Gamma((D-n)/2+1))` throughout, by logarithms, so that D = 7168 is no further than D = 3.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64

from moegeom.geometry.gram import cap_area_log10, symmetric_root


def log_half_binomial(dimension: int, order: int) -> float:
    r""":math:`\ln \binom{D/2}{n/2}` for 0 <= n <= D; oracle in tests: mpmath."""
    half, part = dimension / 2.0, order / 2.0
    return math.lgamma(half + 1.0) - math.lgamma(part + 1.0) - math.lgamma(half - part + 1.0)


def log_slab_share(dimension: int, distance: float, width: float, radius: float) -> float:
    r"""Natural logarithm of the share of a ball within ``width`` of a hyperplane.

    With the hyperplane at a signed ``distance`` :math:`\delta` from the centre,
    :math:`l = \max(-1, (\delta - \epsilon) / R)` and :math:`h = \min(1, (\delta + \epsilon) / R)`,

    .. math:: \tfrac12 [F(h) - F(l)], \quad F(s) = \mathrm{sgn}(s)\, I_{s^2}(\tfrac12, \tfrac{D+1}2)

    -inf where the slab misses the ball. The sign belongs there: without it a slab that does not
    hold the centre comes out too large (docs/theory.md A7). Where both ends are on one side the
    difference is taken of the complements, by logarithms; a slab far thinner than the ball's own
    scale by the density in its middle. Error of the logarithm 1e-9 of itself, of a thin slab
    :math:`((h - l) \sqrt D)^2`.
    Source: Euclidean ball, docs/theory.md A7; oracle in tests: mpmath, and partitions of a ball.
    """
    low, high = max(-1.0, (distance - width) / radius), min(1.0, (distance + width) / radius)
    if low >= high:
        return -math.inf
    if low < 0.0 < high:
        return math.log(0.5 * (_inside(high, dimension) + _inside(-low, dimension)))
    near, far = (low, high) if low >= 0.0 else (-high, -low)
    if (far - near) * math.sqrt(dimension) < _THIN:
        middle = 0.5 * (near + far)
        density = 0.5 * (dimension - 1) * math.log1p(-middle * middle)
        return log_half_binomial(dimension, 1) + math.log(0.5 * (far - near)) + density
    outer, inner = _log_cap(near, dimension), _log_cap(far, dimension)
    return outer + math.log(-math.expm1(inner - outer)) if inner > -math.inf else outer


#: Width of a slab, in units of a ball's own scale, below which its density is taken as constant.
_THIN = 1e-6


def _inside(height: float, dimension: int) -> float:
    """Share of the half ball between its flat side and a height."""
    from scipy.special import betainc

    return float(betainc(0.5, (dimension + 1) / 2.0, height * height))


def _log_cap(height: float, dimension: int) -> float:
    """Logarithm of the share of a unit ball beyond a height of at least 0."""
    # a ball of D dimensions projects as the sphere of directions of D + 2
    sine = math.sqrt(max((1.0 - height) * (1.0 + height), 0.0))
    return cap_area_log10(sine, dimension + 2) * math.log(10.0)


def tube_share(dimension: int, order: int, distance: float, width: float, radius: float) -> float:
    r"""Share of a ball within ``width`` of a flat of codimension n at a ``distance`` of its centre.

    .. math::
        \int p(\rho)\, n \binom{D/2}{n/2} \frac{\rho^{n-1}}{R^n}
        \left(1 - \frac{\rho^2}{R^2}\right)^{(D-n)/2} d\rho

    over :math:`\max(0, \delta - \epsilon) \le \rho \le \min(R, \delta + \epsilon)`, p the share of
    the sphere :math:`|u| = \rho` of :math:`\mathbb R^n` within the width of a point at the
    distance: 1 or 0 where :math:`\cos\varphi = (\rho^2 + \delta^2 - \epsilon^2) / (2\rho\delta)` is
    outside [-1, 1], else the cap of that angle. 0 where the tube misses the ball. Relative error
    1e-8. Codimension 1 is a slab. Source: docs/theory.md A7; oracle in tests: draws, and slabs.
    """
    from scipy.integrate import quad

    if order == 1:
        return math.exp(log_slab_share(dimension, distance, width, radius))
    low, high = max(0.0, distance - width), min(radius, distance + width)
    if low >= high:
        return 0.0
    scale = math.log(order) + log_half_binomial(dimension, order) - order * math.log(radius)

    def density(rho: float) -> float:
        inside = _near_share(rho, distance, width, order)
        rest = 1.0 - (rho / radius) ** 2
        if inside == 0.0 or rest <= 0.0 or rho == 0.0:
            return 0.0
        weight = (order - 1) * math.log(rho) + 0.5 * (dimension - order) * math.log(rest)
        return inside * math.exp(scale + weight)

    # where all of a sphere is near its share has a corner
    corner = [abs(width - distance)] if low < abs(width - distance) < high else None
    return float(quad(density, low, high, points=corner, epsrel=1e-10, limit=200)[0])


def _near_share(rho: float, distance: float, width: float, order: int) -> float:
    from scipy.special import betainc

    if rho == 0.0 or distance == 0.0:
        return float(abs(rho - distance) <= width)
    cosine = (rho * rho + distance * distance - width * width) / (2.0 * rho * distance)
    if cosine <= -1.0:
        return 1.0
    if cosine >= 1.0:
        return 0.0
    cap = 0.5 * float(betainc((order - 1) / 2.0, 0.5, 1.0 - cosine * cosine))
    return cap if cosine >= 0.0 else 1.0 - cap


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
