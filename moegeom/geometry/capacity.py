r"""What a router of given sizes could do at most: counts, bounds and costs from numbers alone.

The hypersimplex :math:`\Delta(k, E)` is the hull of the 0/1 vectors with k ones. Its normal fan is
the central router whose experts are the coordinates, so that vertices stand for cells, edges for
facets and n-faces for strata of codimension n: n + 1 experts that tie, and those above them.

.. math:: Q_k = \mathrm{conv}\{\textstyle\sum_{i \in S} (w_i, b_i) : |S| = k\}, \qquad
   e_k(x) = \max_{|S| = k} \sum_{i \in S} z_i(x) = \max_{v \in Q_k} \langle v, (x, 1) \rangle

The normal cone of a vertex, cut at the height 1, is the closure of a cell: cells of (W, b) are the
vertices that are seen from above, those of (W, -b) the ones from below; facets are edges. Without
biases every vertex is a cell. On a cell :math:`e_k` is linear with the vertex as its coefficients.

Within the cell of a set S the k N neurons of its experts are on or off. A region is a set of inputs
with the same S and the same pattern; where the experts are gated, a pattern of the signs of the
pre-activations of their gates, because the map itself is not piecewise linear then. Softmax weights
make it curved within a region and discontinuous between two cells: regions are counted, not linear
pieces.

One multiply-accumulate (MAC) is two floating-point operations (FLOP). Biases, norms, activations
and the choice itself are left out: they are of the order of E or D, not of their product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

# -------------------------------------------------------------------------------------------- cells
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


def _refuse(num_experts: int, k: int, dims: float = 0, width: int = 1, split: int = 1) -> None:
    if not 1 <= k <= num_experts or dims < 0 or width < 1 or split < 1:
        raise ValueError(
            f"top_k {k} of {num_experts} experts of {width} neurons on {dims} dimensions, "
            f"each split into {split}"
        )


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
    (Gale 1963); False means that neither holds, not that it is impossible: then
    ``most_cells`` decides where it is smaller. Raises ValueError as ``most_cells``. Source:
    docs/theory.md B4.
    """
    _refuse(num_experts, k, dims)
    return dims >= num_experts - 1 or min(k, num_experts - k) <= (dims + 1) // 2


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
    from scipy.special import gammaln, log_ndtr, logsumexp

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
    logs = np.asarray(logsumexp(chance + density, axis=1))
    return dict(zip(possible, logs.tolist(), strict=True))


@cache
def _log_rising(n: int, p: int) -> float:
    r"""Logarithm of the chance that p of n standard Gaussians are over their mean, 0 < p < n.

    The mean is taken away from the Gaussians by adding an imaginary one of variance 1 / n:
    :math:`\pi_n(p) = \binom n p \sqrt{n / 2 \pi} \int A(s)^p A(-s)^{n-p} ds` with
    :math:`A(s) = e^{-s^2/2} \Phi(i s) = w(s / \sqrt 2) / 2`, w the Faddeeva function. On the line
    through the saddle point i y nothing cancels, so that chances of 1e-50 have all their digits;
    the integrand falls as |s|^-n, by the trapezoidal rule in the hyperbolic sine. Of both ends of
    the line the real parts are equal, and so are the chances of p and n - p.
    """
    from scipy.optimize import root_scalar
    from scipy.special import erfcx, wofz

    if n == 2:
        return 0.0
    if 2 * p > n:
        return _log_rising(n, n - p)
    ends = -30.0, 30.0
    slope = root_scalar(lambda y: n * y - p * _mills(y) + (n - p) * _mills(-y), bracket=ends)
    saddle = float(slope.root)
    up, down = _mills(saddle), _mills(-saddle)
    bend = n - p * up * (up - saddle) - (n - p) * down * (down + saddle)
    u = np.linspace(0.0, 20.0, 501)
    s = (np.sinh(u) / math.sqrt(bend) + 1j * saddle) / math.sqrt(2.0)
    top = 1j * saddle / math.sqrt(2.0)
    ratio = (wofz(s) / wofz(top)) ** p * (wofz(-s) / wofz(-top)) ** (n - p)
    half = ratio.real * np.cosh(u)
    whole = float(2.0 * half.sum() - half[0]) * float(u[1]) / math.sqrt(bend)
    peak = p * math.log(erfcx(saddle / math.sqrt(2.0)))
    peak += (n - p) * math.log(erfcx(-saddle / math.sqrt(2.0)))
    ways = math.log(math.comb(n, p)) + 0.5 * math.log(n / (2.0 * math.pi))
    return ways + peak - n * math.log(2.0) + math.log(whole)


def _mills(y: float) -> float:
    """Density of a standard Gaussian at y over the chance to be above it."""
    from scipy.special import erfcx

    return math.sqrt(2.0 / math.pi) / float(erfcx(y / math.sqrt(2.0)))


# ---------------------------------------------------------------------------------------- polytopes
def face_count(k: int, num_experts: int, n: int) -> int:
    r"""Faces of dimension n of :math:`\Delta(k, E)`, exactly; 0 outside 0..E - 1.

    .. math:: f_0 = \binom E k, \quad
       f_n = \binom{E}{n+1} \sum_{a = \max(0, k - n)}^{\min(k - 1, E - n - 1)} \binom{E-n-1}{a}

    The number of ways in which n + 1 experts can tie at the boundary with a others above them. The
    polytope is a point for k = 0 and k = E; :math:`\sum_n (-1)^n f_n = 1`. Raises ValueError for k
    outside 0..E. Source: docs/theory.md B2; oracle in tests: faces enumerated as sets of vertices.
    """
    if not 0 <= k <= num_experts:
        raise ValueError(f"top_k {k} of {num_experts} experts")
    if n == 0:
        return math.comb(num_experts, k)
    if not 0 < n < num_experts or k in (0, num_experts):
        return 0
    above = range(max(0, k - n), min(k - 1, num_experts - n - 1) + 1)
    return math.comb(num_experts, n + 1) * sum(math.comb(num_experts - n - 1, a) for a in above)


def num_edges(k: int, num_experts: int) -> int:
    r"""Edges of :math:`\Delta(k, E)`, :math:`\binom E k k (E - k) / 2`: all facets there can be."""
    return math.comb(num_experts, k) * k * (num_experts - k) // 2


def num_facets(k: int, num_experts: int) -> int:
    r"""Facets of :math:`\Delta(k, E)`: 2 E, or E for k = 1 and k = E - 1; 2 for a segment.

    0 for a point (k = 0 or E). Raises ValueError as ``face_count``.
    """
    return face_count(k, num_experts, num_experts - 2) if num_experts > 1 else 0


def log10_count(count: int) -> float:
    """Decimal logarithm of a count of any size, to float64; -inf for 0."""
    return math.log10(count) if count > 0 else -math.inf


# ------------------------------------------------------------------------------------------ regions
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
    _refuse(num_experts, k, dims, width)
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
    _refuse(num_experts, k, dims, width)
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
    for s, row in _factors(num_experts, k, limits):
        neurons, ways = s * width, 0
        for left, term in enumerate(row):
            j = dims - left
            # from one j to the next below: many times faster than each from the start
            ways = ways * (j + 1) // (neurons - j) if ways else math.comb(neurons, j)
            total += ways * term
    return total


def _factors(
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


# ------------------------------------------ experts cut into g: (E, k, N) becomes (g E, g k, N / g)
def split_sets_log10(num_experts: int, k: int, split: int) -> float:
    r"""How many times more expert sets there are, :math:`\log_{10} \binom{gE}{gk} / \binom E k`.

    To float64 of the exact integers; 0 for g = 1 and for k = E. It counts sets, not cells that
    inputs reach (``most_cells``). Raises ValueError for k outside 1..E and g < 1. Source:
    docs/theory.md B8; oracle in tests: log-gamma of mpmath.
    """
    _refuse(num_experts, k, split=split)
    more = math.comb(split * num_experts, split * k)
    return log10_count(more) - log10_count(math.comb(num_experts, k))


def published_split_log10(num_experts: int, k: int, split: int, dims: float) -> float:
    r"""The gain as S1 prints it, as a decimal logarithm.

    .. math:: \Big[(g - 1) k \ln \frac{e E}{k} - (d + \tfrac12) \ln g\Big] / \ln 10

    0 for g = 1. The factor :math:`g^{-d}` is wrong: experts become narrower, but as many more are
    active, k' N' = k N, and :math:`\Phi(k N, d)` does not change. It can turn a gain into a loss.
    Raises ValueError as ``split_sets_log10`` and for d < 0. Source: S1 Theorem 5.1; docs/theory.md
    B8.
    """
    _refuse(num_experts, k, dims, split=split)
    sets = (split - 1) * k * math.log(math.e * num_experts / k)
    return (sets - (dims + 0.5) * math.log(split)) / math.log(10.0)


# -------------------------------------------------------------------------------------------- costs
@dataclass(frozen=True)
class Parameters:
    """Numbers of weights that one token uses, and that there are."""

    active: int
    total: int


@dataclass(frozen=True)
class PublishedParameters:
    """What Table 1 of S1 counts for inputs of n numbers."""

    dense: Parameters
    top_1: Parameters
    top_k: Parameters
    normalised: Parameters


def published_parameters(num_experts: int, k: int, width: int, hidden: int) -> PublishedParameters:
    r"""Active and total :math:`n N, n N; \; n N, E n N; \; k n N, E n N; \; n N, (E/k) n N`.

    One matrix per expert, where experts have two, gated ones three; no router. The last total is
    rounded down. For sizes of 1 and more. Source: S1 Table 1; docs/theory.md B5.
    """
    one = hidden * width
    return PublishedParameters(
        dense=Parameters(one, one),
        top_1=Parameters(one, num_experts * one),
        top_k=Parameters(k * one, num_experts * one),
        normalised=Parameters(one, num_experts * one // k),
    )


def expert_parameters(hidden: int, width: int, is_gated: bool) -> int:
    r"""Weights of one expert: :math:`3 D N` gated (gate, up, down), :math:`2 D N` not.

    As many MACs per token that it serves. Source: docs/theory.md B5; oracle in tests: the tensors
    of a stored expert.
    """
    return (3 if is_gated else 2) * hidden * width


def layer_parameters(
    num_experts: int, k: int, hidden: int, width: int, shared_width: int, is_gated: bool
) -> Parameters:
    r"""Of a layer: :math:`k c D N + c D N_s + E D` active, :math:`E c D N + c D N_s + E D` total.

    c = 3 for gated experts, else 2; :math:`N_s` neurons of all shared experts together, which run
    for every token; E D is the router. Source: docs/theory.md B5; oracle in tests: the sizes of the
    tensors of a stored layer.
    """
    one = expert_parameters(hidden, width, is_gated)
    always = expert_parameters(hidden, shared_width, is_gated) + num_experts * hidden
    return Parameters(k * one + always, num_experts * one + always)
