"""Measures of docs/theory.md that no command needs: what near ties weighs, and for how long."""

import math

import mpmath
import numpy as np
from scipy.integrate import quad
from scipy.special import betainc
from scipy.stats import binom, ncx2, norm

from moegeom.geometry.border_shares import log_half_binomial


def orthonormal_border_share(num_experts: int, k: int, order: int) -> float:
    """Border share of a tie of n + 1 experts, for orthonormal rows: of the m = E - n - 1 others at
    least k - n and at most k - 1 are above the tied ones (A7).
    """
    others, scale = num_experts - order - 1, 1.0 / math.sqrt(order + 1.0)

    def density(c: float) -> float:
        inside = np.diff(binom.cdf([k - order - 1, k - 1], others, norm.sf(c)))[0]
        return float(norm.pdf(c, scale=scale) * inside)

    return quad(density, -12.0 * scale, 12.0 * scale, epsabs=1e-13, epsrel=1e-12)[0]


def log_slab_share(dimension: int, distance: float, width: float, radius: float) -> float:
    """Logarithm of the share of a ball within ``width`` of a hyperplane at a signed ``distance`` of
    its centre: the integral of the sections (A7).
    """
    low, high = max(-1.0, (distance - width) / radius), min(1.0, (distance + width) / radius)
    if low >= high:
        return -math.inf
    with mpmath.workdps(60):
        power = (mpmath.mpf(dimension) - 1) / 2
        # most of it may lie at the end that is nearer to the middle
        near, far = (low, high) if abs(low) < abs(high) else (high, low)
        cuts = sorted(near + (far - near) * (mpmath.mpf(step) / 64) ** 5 for step in range(65))
        share = mpmath.quad(lambda s: (1 - s * s) ** power, cuts)
        return float(mpmath.log(share / mpmath.beta(mpmath.mpf(1) / 2, power + 1)))


def tube_share(dimension: int, order: int, distance: float, width: float, radius: float) -> float:
    """Share of a ball within ``width`` of a flat of codimension n > 1 at a ``distance``: over the
    spheres around the centre of the flat's complement, the cap of each that is near (A7).
    """
    low, high = max(0.0, distance - width), min(radius, distance + width)
    if low >= high:
        return 0.0
    scale = math.log(order) + log_half_binomial(dimension, order) - order * math.log(radius)

    def density(rho: float) -> float:
        cosine = -1.0 if distance == 0.0 else rho * rho + distance**2 - width**2
        cosine = min(1.0, max(-1.0, cosine / (2.0 * rho * distance or 1.0)))
        cap = 0.5 * betainc((order - 1) / 2.0, 0.5, 1.0 - cosine * cosine)
        shell = (order - 1) * math.log(rho)
        shell += 0.5 * (dimension - order) * math.log1p(-((rho / radius) ** 2))
        return (cap if cosine >= 0.0 else 1.0 - cap) * math.exp(scale + shell)

    # where all of a sphere is near its share has a corner
    corner = [abs(width - distance)] if low < abs(width - distance) < high else None
    return quad(density, low, high, points=corner, epsrel=1e-10, limit=200)[0]


def tube_occupation(
    order: int, distance: float, width: float, horizon: float, scale: float = 1.0
) -> float:
    """Mean time within ``width`` of a flat of codimension n, for isotropic noise of standard
    deviation ``scale`` a coordinate per unit of time (A10).
    """

    def inside(log_time: float) -> float:
        spread = scale**2 * math.exp(log_time)
        return ncx2.cdf(width**2 / spread, order, distance**2 / spread) * math.exp(log_time)

    # before this nothing is reached, or nothing has left: 40 standard deviations
    start = 2.0 * math.log(max(abs(distance - width), 1e-150) / (40.0 * scale))
    start = min(start, math.log(horizon))
    before = math.exp(start) if distance < width else 0.0
    found = quad(inside, start, math.log(horizon), epsabs=1e-13 * horizon, epsrel=1e-10, limit=400)
    return before + found[0]


def tied_weight(logits: np.ndarray, chosen: np.ndarray, pair: np.ndarray) -> np.ndarray:
    """Softmax over the chosen logits of the expert of the pair that is given up, at a tie (A13)."""
    tied = np.take_along_axis(logits, pair[:, :1], axis=1)
    return 1.0 / np.exp(np.take_along_axis(logits, chosen, axis=1) - tied).sum(axis=1)
