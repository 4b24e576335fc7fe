"""How many cells a router can have, and how many a random one has: to plan with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from scipy.special import dawsn, gammaln, log_ndtr


def zaslavsky(num_hyperplanes: int, dims: int) -> int:
    r"""Regions of m generic hyperplanes, :math:`\Phi(m, d) = \sum_{j \le d} \binom m j`.

    Exactly; 2^m for d >= m, 0 for d < 0. Source: Zaslavsky 1975; docs/theory.md B3; oracle in
    tests: deletion and restriction, and the binomial distribution.
    """
    term, total = 1, 0
    for j in range(min(num_hyperplanes, dims) + 1):
        total += term
        term = term * (num_hyperplanes - j) // (j + 1)
    return total


def log_zaslavsky(num_hyperplanes: int, dims: int) -> float:
    r"""Natural logarithm of :math:`\Phi(m, d)`, to float64 of the exact integer; for d >= 0."""
    return math.log(zaslavsky(num_hyperplanes, dims))


def total_cells(num_experts: int, dims: int, is_central: bool) -> int:
    r"""Cells of all orders k = 0..E together, of rows (and biases) in general position.

    .. math:: \sum_k N_k = \Phi(E, d + 1), \qquad \text{central: } 2 \Phi(E - 1, d)

    For d >= 1 and d >= 0. Source: docs/theory.md B4; oracle in tests: cells enumerated for every k.
    """
    if is_central:
        return 2 * zaslavsky(num_experts - 1, dims)
    return zaslavsky(num_experts, dims + 1)


def most_cells(num_experts: int, k: int, dims: int, is_central: bool) -> int:
    r"""Upper bound of the number of cells :math:`N_k` of any router on d dimensions, exactly.

    For d >= E - 1 all :math:`\binom E k`, which rows of rank E - 1 have; 1 for k = E and for d = 0;
    at most E for k = 1 and k = E - 1. Else the sum over all orders less the least that the others
    take, d + 1 each and one for k = 0 and k = E:

    .. math:: \Phi(E, d+1) - 2 - (E - 2)(d + 1); \quad
       \text{central: } \tfrac12 (2 \Phi(E-1, d) - 2 - (E-3)(d+1)),

    or without the half and with E - 2 for k = E / 2, because N_k = N_{E-k}. Cells are open, so that
    rows in special position have no more than some in general position. Raises ValueError for k
    outside 1..E and d < 0. Source: docs/theory.md B4; oracle in tests: cells enumerated.
    """
    if not 1 <= k <= num_experts or dims < 0:
        raise ValueError(f"top_k {k} of {num_experts} experts on {dims} dimensions")
    subsets = math.comb(num_experts, k)
    if dims == 0 or k == num_experts:
        return 1
    if dims >= num_experts - 1:
        return subsets
    if k in (1, num_experts - 1):
        subsets = num_experts
    if not is_central:
        own = total_cells(num_experts, dims, False) - 2 - (num_experts - 2) * (dims + 1)
    elif 2 * k == num_experts:
        own = total_cells(num_experts, dims, True) - 2 - (num_experts - 2) * (dims + 1)
    else:
        own = (total_cells(num_experts, dims, True) - 2 - (num_experts - 3) * (dims + 1)) // 2
    return min(subsets, own)


def most_cells_none_hidden(num_experts: int, k: int) -> int:
    r"""Upper bound of :math:`N_k` on a plane where every expert is first somewhere.

    :math:`(2 k - 1) E - 2 k^2 + 2` for k <= E / 2, as of order-k Voronoi diagrams; larger k fall
    back on ``most_cells``. Source: Lee 1982; docs/theory.md B4.
    """
    bound = most_cells(num_experts, k, 2, is_central=False)
    if 2 * k > num_experts:
        return bound
    return min(bound, (2 * k - 1) * num_experts - 2 * k * k + 2)


def most_vertices(num_experts: int, dims: int, is_central: bool) -> int:
    r"""Upper bound of the vertices that a walk visits, :math:`\binom{E}{d+1}`.

    Each is the place where d + 1 experts tie, whatever k is. A central router is walked on two
    charts of d - 1 dimensions. Source: docs/theory.md G1.
    """
    return 2 * math.comb(num_experts, dims) if is_central else math.comb(num_experts, dims + 1)


@dataclass(frozen=True)
class ExpectedDiagram:
    """Mean numbers of vertices that a walk visits, of cells and of facets."""

    vertices: float
    cells: float
    facets: float


def expected_diagram(num_experts: int, k: int, dims: int, is_central: bool) -> ExpectedDiagram:
    r"""Mean size of the diagram of a router whose (w_i, b_i) are independent Gaussian vectors.

    No fit: of one distribution, any mean and covariance of full rank, the mean is an integral. At a
    vertex n = d + 1 of the vectors span a hyperplane, whose offset h is Gaussian of variance 1 / n,
    and each other one is above it with chance :math:`Q = \Phi(-h)`, so that a of them are with

    .. math:: P_n(a) = \int \varphi_{1/n}(h) \binom{E-n}{a} Q^a (1 - Q)^{E-n-a} dh

    and :math:`V_k = \binom E n \sum_{a=k-d}^{k-1} P_n(a)`. A vertex is the lowest one of the cell
    that takes those p of its n experts that rise with the height; p is distributed as the number of
    n standard Gaussians over their mean, :math:`\pi_n`. Cells without a lowest vertex are those in
    one dimension less, far below:

    .. math:: N_k(d) = \binom E n \sum_p \pi_n(p) P_n(k - p) + N_k(d - 1), \quad N_k(0) = 1

    and likewise for facets. A central router is two affine ones of d - 1 dimensions less what
    crosses both charts. Routers of checkpoints are not Gaussian: a guide for them. inf beyond
    float64.
    Raises ValueError as ``most_cells``. Source: affine Blaschke-Petkantschin formula (Miles 1971);
    oracle in tests: means over enumerated random routers, and C(E, k) for d = E - 1.
    """
    if not 1 <= k <= num_experts or dims < 0:
        raise ValueError(f"top_k {k} of {num_experts} experts on {dims} dimensions")
    if k == num_experts or dims == 0:
        return ExpectedDiagram(0.0, 1.0, 0.0)
    if is_central and dims == 1:
        return ExpectedDiagram(0.0, 2.0, 1.0)
    if not is_central:
        vertices = _vertices(num_experts, k, dims)
        return ExpectedDiagram(vertices, *_cells_and_facets(num_experts, k, dims))
    cells, facets = 2.0, 0.0  # facets that cross a line through 0 elsewhere
    for chart in range(1, min(dims, num_experts - 1)):
        on_chart = _cells_and_facets(num_experts, k, chart)
        cells, facets = 2.0 * on_chart[0] - cells, 2.0 * on_chart[1] - facets
    return ExpectedDiagram(2.0 * _vertices(num_experts, k, dims - 1), cells, facets)


def _vertices(num_experts: int, k: int, dims: int) -> float:
    above = _above(num_experts, dims + 1)
    return _float(math.comb(num_experts, dims + 1)) * float(above[max(0, k - dims) : k].sum())


def _cells_and_facets(num_experts: int, k: int, dims: int) -> tuple[float, float]:
    cells, facets = 1.0, 0.0
    for n in range(2, min(dims + 1, num_experts) + 1):
        above, rising = _above(num_experts, n), _rising(n)
        chances = {a: float(chance) for a, chance in enumerate(above)}
        ways = _float(math.comb(num_experts, n))
        for p in range(1, n):
            share = ways * float(rising[p])
            falling = n - p
            cells += share * chances.get(k - p, 0.0)
            facets += share * math.comb(p, 2) * chances.get(k + 1 - p, 0.0)
            facets += share * p * falling * chances.get(k - p, 0.0)
            facets += share * math.comb(falling, 2) * chances.get(k - 1 - p, 0.0)
    return cells, facets


def _float(count: int) -> float:
    return float(count) if count.bit_length() < 1024 else math.inf


def _above(num_experts: int, n: int) -> Float64[np.ndarray, "counts"]:
    """Chances P_n(a) for a from 0 to E - n, by the trapezoidal rule, which is exact to rounding."""
    others = num_experts - n
    if others < 0:
        return np.zeros(1)
    h = np.linspace(-9.0, 9.0, 40 * math.isqrt(num_experts) + 201)  # in units of sqrt(1 / n)
    offset = h / math.sqrt(n)
    a = np.arange(others + 1)[:, None]
    ways = gammaln(others + 1.0) - gammaln(a + 1.0) - gammaln(others - a + 1.0)
    chance = np.exp(ways + a * log_ndtr(-offset) + (others - a) * log_ndtr(offset))
    density = np.exp(-0.5 * h**2) / math.sqrt(2.0 * math.pi) * (h[1] - h[0])
    return chance @ density


def _rising(n: int) -> Float64[np.ndarray, "counts"]:
    r"""Chances that p of n standard Gaussians are over their mean, for p from 0 to n.

    The mean is taken away from the Gaussians by adding an imaginary one of variance 1 / n:
    :math:`\pi_n(p) = \binom n p \sqrt{n / 2 \pi} \int A(s)^p \bar A(s)^{n-p} ds` with
    :math:`A(s) = e^{-s^2/2} \Phi(i s)`, which falls as 1 / s; by the trapezoidal rule in the
    hyperbolic sine.
    """
    if n == 2:
        return np.array([0.0, 1.0, 0.0])
    u = np.linspace(-20.0, 20.0, 1001)
    s = np.sinh(u)
    density = np.cosh(u) * (u[1] - u[0]) * math.sqrt(n / (2.0 * math.pi))
    factor = 0.5 * np.exp(-0.5 * s**2) + 1j * dawsn(s / math.sqrt(2.0)) / math.sqrt(math.pi)
    found = np.zeros(n + 1)
    for p in range(1, n):
        value = (density * factor**p * np.conj(factor) ** (n - p)).sum()
        found[p] = math.comb(n, p) * value.real
    return found
