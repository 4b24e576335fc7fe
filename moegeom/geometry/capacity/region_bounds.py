r"""Regions of a mixture of ReLU experts: pairs of an expert set and a pattern of its neurons.

Within the cell of a set S the k N neurons of its experts are on or off. A region is a set of inputs
with the same S and the same pattern; where the experts are gated, a pattern of the signs of the
pre-activations of their gates, because the map itself is not piecewise linear then. Softmax weights
make it curved within a region and discontinuous between two cells: regions are counted, not linear
pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from moegeom.geometry.capacity.cell_bounds import most_cells, zaslavsky


@dataclass(frozen=True)
class PublishedRegions:
    """What S1 prints as capacities of layers of experts with N neurons each."""

    dense: int
    top_1: int
    top_k: int
    normalised: int


def published_regions(num_experts: int, k: int, width: int, dims: int) -> PublishedRegions:
    r"""The printed formulas, on d dimensions and exactly.

    .. math:: \Phi(k N, d), \quad E\,\Phi(N, d), \quad \binom E k \Phi(k N, d), \quad
       \binom E k \Phi(N, d)

    of a dense layer with as many active neurons, of top-1, of top-k, and of top-k whose experts
    together are as wide as one. Called tight there; the third and the fourth can exceed what is
    possible (``most_regions``). Raises ValueError as ``most_regions``. Source: S1 Proposition 4.10,
    Theorems 4.14 and 4.17, Table 1; docs/theory.md B5.
    """
    _refuse(num_experts, k, width, dims)
    sets, narrow = math.comb(num_experts, k), zaslavsky(width, dims)
    dense = zaslavsky(k * width, dims)
    return PublishedRegions(dense, num_experts * narrow, sets * dense, sets * narrow)


def most_regions(num_experts: int, k: int, width: int, dims: int) -> int:
    r"""Upper bound R of the regions of any router and any ReLU experts on d dimensions, exactly.

    In an open convex cell an arrangement in general position has as many regions as it has flats
    that meet the cell. A flat of j neurons that belong to t experts lies in cells of sets that hold
    these t, and it meets no more cells than a router has on d - j dimensions:

    .. math:: R = \sum_{j=0}^{d} \sum_{t=0}^{\min(j, k)} \binom E t\, S_N(t, j)\,
       \min\Big\{\binom{E-t}{k-t},\, N_k(E, d - j)\Big\}, \quad
       S_N(t, j) = \sum_{i=0}^{t} (-1)^i \binom t i \binom{(t-i) N}{j}

    with :math:`N_k` of ``most_cells``, 1 on no dimensions, and S the ways to take j neurons from
    all of t experts. E Phi(N, d) for k = 1 and :math:`N_k \ge E`; Phi(E N, d) for k = E; 1 for
    d = 0. It is summed as the published count less what the minimum takes away, of which all but
    one sum are known in closed form: 20 ms where the double sum takes minutes. Neurons in special
    position have no more regions than some in general position. Raises ValueError for k outside
    1..E, a width below 1 and d < 0. Source: Zaslavsky 1975; docs/theory.md B6; oracle in tests: the
    double sum over subsets of neurons, one by one, and regions of random draws.
    """
    _refuse(num_experts, k, width, dims)
    total = math.comb(num_experts, k) * zaslavsky(k * width, dims)
    return total - _taken(num_experts, k, width, dims)


def _first_within(num_experts: int, k: int, cells: int) -> int:
    """The least t for which no more than ``cells`` sets hold t given experts."""
    least, most = 0, k
    while least < most:
        middle = (least + most) // 2
        if math.comb(num_experts - middle, k - middle) <= cells:
            most = middle
        else:
            least = middle + 1
    return least


def _taken(num_experts: int, k: int, width: int, dims: int) -> int:
    r"""The sum that the minimum removes, over flats of j neurons of fewer than T experts.

    T is the least t for which :math:`\binom{E-t}{k-t} \le N_k = N_k(E, d - j)`. For each j

    .. math:: \sum_{t < T} S_N(t, j) \Big[\binom E k \binom k t - \binom E t N_k\Big]
       = \sum_{s < T} (-1)^{T-1-s} \binom{s N}{j} \Big[\binom E k \binom k s \binom{k-s-1}{T-1-s}
       - N_k \binom E s \binom{E-s-1}{T-1-s}\Big]

    by the sum of a row of binomials with alternating signs.
    """
    limits: list[tuple[int, int]] = []
    for left in range(min(dims, num_experts - 1) + 1):
        cells = most_cells(num_experts, k, left, is_central=False)
        touched = _first_within(num_experts, k, cells)
        if touched == 0:
            break  # the bound of cells does not fall with the dimension
        limits.append((cells, touched))
    total = 0
    for s, row in _terms(num_experts, k, limits):
        neurons, ways = s * width, 0
        for left, term in enumerate(row):
            j = dims - left
            # from one j to the next below: many times faster than each from the start
            ways = ways * (j + 1) // (neurons - j) if ways else math.comb(neurons, j)
            total += ways * term
    return total


def _terms(
    num_experts: int, k: int, limits: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, list[int]]]:
    """For each s the factors behind the binomials of s N, by the dimensions that are left.

    Each binomial is made of the one before.
    """
    of_set, of_all = math.comb(num_experts, k), 1
    within = [math.comb(k - 1, touched - 1) for _, touched in limits]
    among = [math.comb(num_experts - 1, touched - 1) for _, touched in limits]
    for s in range(max((touched for _, touched in limits), default=0)):
        row = []
        for left, (cells, touched) in enumerate(limits):
            rest = touched - 1 - s
            if rest < 0:
                row.append(0)
                continue
            term = of_set * within[left] - cells * of_all * among[left]
            row.append(term if rest % 2 == 0 else -term)
            if rest:
                within[left] = within[left] * rest // (k - s - 1)
                among[left] = among[left] * rest // (num_experts - s - 1)
        yield s, row
        of_set = of_set * (k - s) // (s + 1)
        of_all = of_all * (num_experts - s) // (s + 1)


def leading_regions(num_experts: int, k: int, width: int, dims: int) -> Fraction:
    r"""What ``most_regions`` grows like as the experts become wide.

    .. math:: \frac{N^d}{d!} \sum_{t \le \min(k, d)} \binom E t\, t!\, {d \brace t}

    with the Stirling numbers of the second kind; 1 for d = 0. For k >= d it is
    :math:`(E N)^d / d!`, the capacity of a dense layer of all E N neurons: no set of experts adds
    to that. Raises ValueError as ``most_regions``. Source: docs/theory.md B6; oracle in tests: the
    limit of the ratio, and that closed form.
    """
    _refuse(num_experts, k, width, dims)
    onto = 0
    for t in range(min(k, dims) + 1):
        terms = ((-1) ** i * math.comb(t, i) * (t - i) ** dims for i in range(t + 1))
        onto += math.comb(num_experts, t) * sum(terms)
    return Fraction(width**dims * onto, math.factorial(dims))


def zonotope_vertices(num_generators: int, dims: int) -> int:
    r"""Vertices of a zonotope of m generators in general position in d + 1 dimensions, exactly.

    :math:`2 \Phi(m - 1, d)`: regions of m hyperplanes through 0 in d + 1 dimensions. The m affine
    hyperplanes on d dimensions that are a slice of them have :math:`\Phi(m, d)`, more than half as
    many. Raises ValueError for m < 1 and d < 0. Source: S1 Proposition 4.10 (by duality);
    docs/theory.md B5; oracle in tests: the hull of all sums of generators, by Qhull.
    """
    if num_generators < 1 or dims < 0:
        raise ValueError(f"{num_generators} generators on {dims} dimensions")
    return 2 * zaslavsky(num_generators - 1, dims)


def log_leading_zaslavsky(num_hyperplanes: int, dims: int) -> float:
    r"""Natural logarithm of :math:`m^d / d!`, to which :math:`\Phi(m, d)` is equal for m >> d only.

    For m >= 1 and d >= 0. For 16384 neurons in 7168 dimensions it is too large by
    :math:`e^{1863}`. Source: S1 Proposition 4.10; docs/theory.md B3.
    """
    return dims * math.log(num_hyperplanes) - math.lgamma(dims + 1)


def _refuse(num_experts: int, k: int, width: int, dims: int) -> None:
    if not 1 <= k <= num_experts or width < 1 or dims < 0:
        raise ValueError(
            f"top_k {k} of {num_experts} experts of {width} neurons on {dims} dimensions"
        )
