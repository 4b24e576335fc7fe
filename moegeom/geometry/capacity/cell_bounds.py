"""How many cells a router can have, and how many a random one has: to plan with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import erfcx, gammaln, log_ndtr, logsumexp, wofz

from moegeom.core.shapes import Float64

#: The largest exponent of a float64.
_MOST_EXPONENT = 709.0


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


def total_cells(num_experts: int, dims: int, is_central: bool) -> int:
    r"""Cells of all orders k = 0..E together, of rows (and biases) in general position.

    .. math:: \sum_k N_k = \Phi(E, d + 1), \qquad \text{central: } 2 \Phi(E - 1, d)

    For d >= 1 and d >= 0. Source: docs/theory.md B4; oracle in tests: cells enumerated for every k.
    """
    if is_central:
        return 2 * zaslavsky(num_experts - 1, dims)
    return zaslavsky(num_experts, dims + 1)


def _refuse(num_experts: int, k: int, dims: int) -> None:
    if not 1 <= k <= num_experts or dims < 0:
        raise ValueError(f"top_k {k} of {num_experts} experts on {dims} dimensions")


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
    _refuse(num_experts, k, dims)
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


def first_free_dimension(num_experts: int, k: int) -> int:
    """The least number of dimensions on which ``most_cells`` of biased rows allows every set.

    0 where there is one set only; E - 1 at most. The bound does not fall with the dimension.
    Raises ValueError as ``most_cells``. Source: docs/theory.md B4; oracle in tests: one after the
    other.
    """
    subsets, least, most = math.comb(num_experts, k), 0, max(num_experts - 1, 0)
    while least < most:
        middle = (least + most) // 2
        if most_cells(num_experts, k, middle, is_central=False) == subsets:
            most = middle
        else:
            least = middle + 1
    most_cells(num_experts, k, least, is_central=False)
    return least


def is_every_set_possible(num_experts: int, k: int, dims: int) -> bool:
    r"""Whether some rows and biases on d dimensions have all :math:`\binom E k` cells.

    True for d >= E - 1 and for :math:`\min(k, E - k) \le \lfloor (d + 1) / 2 \rfloor`
    (``moment_router``); False means that neither holds, not that it is impossible: then
    ``most_cells`` decides where it is smaller. Raises ValueError as ``most_cells``. Source:
    docs/theory.md B4.
    """
    _refuse(num_experts, k, dims)
    return dims >= num_experts - 1 or min(k, num_experts - k) <= (dims + 1) // 2


def moment_router(
    num_experts: int, k: int
) -> tuple[Float64[np.ndarray, "experts dims"], Float64[np.ndarray, "experts"]]:
    r"""Rows and biases on 2 min(k, E - k) - 1 dimensions of which every k-set is a cell.

    .. math:: w_i = (t_i, t_i^2, \dots, t_i^{2k-1}), \quad b_i = -t_i^{2k}, \quad
       t_i = -1 + 2 i / (E - 1)

    for k <= E / 2, else those of E - k with the opposite sign. At the input whose entries are
    the coefficients of :math:`-\prod_{s \in S} (t - t_s)^2` the logits of S are one number and all
    others less. Raises ValueError for k outside 1..E - 1. Source: Gale 1963 (neighbourly
    polytopes); docs/theory.md B4; oracle in tests: that polynomial in rational numbers.
    """
    if not 1 <= k < num_experts:
        raise ValueError(f"top_k {k} of {num_experts} experts")
    least = min(k, num_experts - k)
    powers = np.linspace(-1.0, 1.0, num_experts)[:, None] ** np.arange(1, 2 * least + 1)
    sign = 1.0 if k == least else -1.0
    return sign * powers[:, :-1], -sign * powers[:, -1]


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
    _refuse(num_experts, k, dims)
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
    n = dims + 1
    ways = _log_ways(num_experts, n)
    above = _log_above(num_experts, n, range(max(0, k - dims), k))
    return sum(_exp(ways + chance) for chance in above.values())


def _cells_and_facets(num_experts: int, k: int, dims: int) -> tuple[float, float]:
    cells, facets = 1.0, 0.0
    for n in range(2, min(dims + 1, num_experts) + 1):
        ways = _log_ways(num_experts, n)
        above = _log_above(num_experts, n, range(max(0, k - n), k + 1))
        for p in range(max(1, k - 1 - num_experts + n), min(n - 1, k + 1) + 1):
            share = ways + _log_rising(n, p)
            falling = n - p
            for pairs, a in (
                (math.comb(p, 2), k + 1 - p),
                (p * falling, k - p),
                (math.comb(falling, 2), k - 1 - p),
            ):
                count = _exp(share + above[a]) if a in above else 0.0
                cells += count if a == k - p else 0.0
                facets += pairs * count
    return cells, facets


def _log_ways(num_experts: int, n: int) -> float:
    ways = math.comb(num_experts, n)
    return math.log(ways) if ways else -math.inf


def _exp(exponent: float) -> float:
    """inf beyond float64."""
    return math.exp(exponent) if exponent < _MOST_EXPONENT else math.inf


def _log_above(num_experts: int, n: int, counts: range) -> dict[int, float]:
    """Logarithms of the chances P_n(a) for those a of ``counts`` that there can be.

    By the trapezoidal rule, which is exact to rounding for what falls like a Gaussian, on offsets
    that reach beyond the largest of E Gaussians: few others above, of many, is far in the tail.
    """
    others = num_experts - n
    possible = [count for count in counts if count <= others]
    if not possible:
        return {}
    reach = 9.0 + math.sqrt(2.0 * n * math.log(num_experts))
    step = 18.0 / (40 * math.isqrt(num_experts) + 200)
    h = np.arange(-math.ceil(reach / step), math.ceil(reach / step) + 1) * step  # over sqrt(1 / n)
    offset = h / math.sqrt(n)
    a = np.array(possible)[:, None]
    ways = gammaln(others + 1.0) - gammaln(a + 1.0) - gammaln(others - a + 1.0)
    chance = ways + a * log_ndtr(-offset) + (others - a) * log_ndtr(offset)
    density = math.log(step) - 0.5 * math.log(2.0 * math.pi) - 0.5 * h**2
    return dict(zip(possible, logsumexp(chance + density, axis=1).tolist(), strict=True))


@cache
def _log_rising(n: int, p: int) -> float:
    r"""Logarithm of the chance that p of n standard Gaussians are over their mean, 0 < p < n.

    The mean is taken away from the Gaussians by adding an imaginary one of variance 1 / n:
    :math:`\pi_n(p) = \binom n p \sqrt{n / 2 \pi} \int A(s)^p A(-s)^{n-p} ds` with
    :math:`A(s) = e^{-s^2/2} \Phi(i s) = w(s / \sqrt 2) / 2`, w the Faddeeva function. On the line
    through the saddle point i y nothing cancels, so that chances of 1e-50 have all their digits;
    the integrand falls as |s|^-n, by the trapezoidal rule in the hyperbolic sine.
    """
    if n == 2:
        return 0.0
    least, most = -30.0, 30.0
    while most - least > 1e-12:
        saddle = 0.5 * (least + most)
        if n * saddle < p * _mills(saddle) - (n - p) * _mills(-saddle):
            least = saddle
        else:
            most = saddle
    saddle = 0.5 * (least + most)
    up, down = _mills(saddle), _mills(-saddle)
    bend = n - p * up * (up - saddle) - (n - p) * down * (down + saddle)
    u = np.linspace(-20.0, 20.0, 1001)
    s = (np.sinh(u) / math.sqrt(bend) + 1j * saddle) / math.sqrt(2.0)
    top = 1j * saddle / math.sqrt(2.0)
    ratio = (wofz(s) / wofz(top)) ** p * (wofz(-s) / wofz(-top)) ** (n - p)
    whole = float((ratio.real * np.cosh(u)).sum()) * float(u[1] - u[0]) / math.sqrt(bend)
    peak = p * math.log(erfcx(saddle / math.sqrt(2.0)))
    peak += (n - p) * math.log(erfcx(-saddle / math.sqrt(2.0)))
    ways = math.log(math.comb(n, p)) + 0.5 * math.log(n / (2.0 * math.pi))
    return ways + peak - n * math.log(2.0) + math.log(whole)


def _mills(y: float) -> float:
    """Density of a standard Gaussian at y over the chance to be above it."""
    return math.sqrt(2.0 / math.pi) / float(erfcx(y / math.sqrt(2.0)))
