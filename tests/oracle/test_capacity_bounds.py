"""Bounds of cells and regions against linear programs, enumerations, hulls and random draws."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.spatial import ConvexHull

from moegeom.geometry.capacity.cell_bounds import (
    expected_diagram,
    first_free_dimension,
    is_every_set_possible,
    moment_router,
    most_cells,
    total_cells,
    zaslavsky,
)
from moegeom.geometry.capacity.costs import (
    expert_parameters,
    layer_parameters,
    published_macs,
    published_parameters,
    router_macs,
)
from moegeom.geometry.capacity.granularity import (
    largest_split,
    published_split_log10,
    split_sets_log10,
)
from moegeom.geometry.capacity.region_bounds import (
    leading_regions,
    log_leading_zaslavsky,
    most_regions,
    published_regions,
    zonotope_vertices,
)


# -------------------------------------------------------------------------------------------- cells
def is_cell(weight, bias, chosen):
    """A linear program: an input at which every expert of the set is ahead of every other."""
    experts, dims = weight.shape
    others = [j for j in range(experts) if j not in chosen]
    pairs = [(i, j) for i in chosen for j in others]
    rows = [np.append(weight[j] - weight[i], 1.0) for i, j in pairs]
    limits = [bias[i] - bias[j] for i, j in pairs]
    if not pairs:
        return True
    bounds = [(None, None)] * dims + [(None, 1.0)]
    found = linprog(np.append(np.zeros(dims), -1.0), np.array(rows), limits, bounds=bounds)
    return found.status == 0 and found.x[-1] > 1e-9


def cells_of_every_order(experts, dims):
    random = np.random.default_rng([experts, dims])
    weight, bias = random.standard_normal((experts, dims)), random.standard_normal(experts)
    return [
        sum(is_cell(weight, bias, s) for s in itertools.combinations(range(experts), k))
        for k in range(experts + 1)
    ]


@pytest.mark.parametrize(
    ("experts", "dims"), [(6, 2), (7, 3), pytest.param(8, 2, marks=pytest.mark.nightly)]
)
def test_cells_of_all_orders_add_up_and_none_has_more_than_the_bound(experts, dims):
    counts = cells_of_every_order(experts, dims)
    assert sum(counts) == total_cells(experts, dims, is_central=False)
    for k in range(1, experts + 1):
        assert counts[k] <= most_cells(experts, k, dims, is_central=False)


def test_the_bound_grows_with_the_dimension_until_it_allows_every_set():
    for experts, k in [(64, 8), (9, 3), (9, 1), (12, 6), (5, 5), (1, 1)]:
        bounds = [most_cells(experts, k, d, is_central=False) for d in range(experts + 2)]
        assert bounds == sorted(bounds)
        free = [d for d, bound in enumerate(bounds) if bound == math.comb(experts, k)]
        assert first_free_dimension(experts, k) == free[0]
    assert first_free_dimension(64, 8) == 7
    np.testing.assert_allclose(math.log10(most_cells(64, 8, 4, False)), 6.92, atol=0.005)
    np.testing.assert_allclose(math.log10(math.comb(64, 8)), 9.65, atol=0.005)


@pytest.mark.parametrize(("experts", "k"), [(9, 3), (7, 1), (8, 4), (9, 6)])
def test_every_set_is_a_cell_of_the_moment_router(experts, k):
    """At the coefficients of a polynomial with double roots, in rational numbers."""
    weight, bias = moment_router(experts, k)
    least = min(k, experts - k)
    assert weight.shape == (experts, 2 * least - 1)
    assert is_every_set_possible(experts, k, 2 * least - 1)
    rows = [[Fraction(value) for value in row] for row in weight]
    t = [row[0] if k == least else -row[0] for row in rows]
    for few in itertools.combinations(range(experts), least):
        polynomial = [Fraction(1)]
        for s in few:  # times (x - t_s)^2, lowest power first
            for _ in range(2):
                shifted = [Fraction(0), *polynomial]
                polynomial = [a - t[s] * b for a, b in zip(shifted, [*polynomial, 0], strict=True)]
        place = [-c for c in polynomial[1:-1]]
        logits = [
            sum(a * b for a, b in zip(row, place, strict=True)) + Fraction(offset)
            for row, offset in zip(rows, bias, strict=True)
        ]
        chosen = few if k == least else tuple(i for i in range(experts) if i not in few)
        rest = [logits[j] for j in range(experts) if j not in chosen]
        assert min(logits[i] for i in chosen) - max(rest) > 1e-5 * max(map(abs, logits))


def test_what_no_rows_are_known_for_is_not_promised():
    assert not is_every_set_possible(16, 4, 2)
    assert is_every_set_possible(16, 4, 15)
    assert is_every_set_possible(16, 4, 7)
    assert most_cells(16, 4, 2, is_central=False) == 653
    for call in (is_every_set_possible, first_free_dimension):
        with pytest.raises(ValueError, match="top_k 9 of 4"):
            call(*((4, 9, 2) if call is is_every_set_possible else (4, 9)))
    with pytest.raises(ValueError, match="top_k 4 of 4"):
        moment_router(4, 4)


def chance_to_be_over_the_mean(n, p):
    """By quadrature with 80 digits where the integrand oscillates."""
    with mpmath.workdps(80):
        factor = mpmath.sqrt(n / (2 * mpmath.pi)) * mpmath.binomial(n, p)

        def integrand(s):
            half = mpmath.erfc(-1j * s / mpmath.sqrt(2)) / 2
            other = mpmath.erfc(1j * s / mpmath.sqrt(2)) / 2
            return mpmath.re(mpmath.exp(-n * s * s / 2) * half**p * other ** (n - p))

        return 2 * factor * mpmath.quad(integrand, [0, 0.5, 1, 2, 3, 5, 8, 14])


@pytest.mark.parametrize(("experts", "k"), [(20, 8), (9, 2)])
def test_one_dimension_below_all_a_gaussian_router_lacks_the_share_of_one_event(experts, k):
    r"""C(E, k) less the chance that k of E Gaussians are over their mean: one cell at most."""
    found = math.comb(experts, k) - expected_diagram(experts, k, experts - 2, False).cells
    wanted = float(chance_to_be_over_the_mean(experts, k))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-12 * math.comb(experts, k))


@pytest.mark.parametrize(("experts", "dims"), [(64, 50), (256, 20), (512, 50)])
def test_means_on_many_dimensions_are_between_one_and_the_bound(experts, dims):
    for k in (1, 2, 3, 8):
        mean = expected_diagram(experts, k, dims, is_central=False).cells
        assert 1.0 <= mean <= most_cells(experts, k, dims, is_central=False)
    lower = expected_diagram(experts, 1, dims - 1, is_central=False).cells
    assert lower <= expected_diagram(experts, 1, dims, is_central=False).cells


@pytest.mark.parametrize("k", [1, 2])
def test_on_a_hundred_dimensions_every_pair_of_512_gaussian_experts_is_a_cell(k):
    """Convex hulls of that many Gaussian points in that many dimensions are neighbourly."""
    mean = expected_diagram(512, k, 100, is_central=False).cells
    np.testing.assert_allclose(mean, math.comb(512, k), rtol=1e-9)


# ------------------------------------------------------------------------------------------ regions
def counted_regions(experts, k, width, dims):
    """The definition of the bound, subset by subset of all neurons."""
    owner = [expert for expert in range(experts) for _ in range(width)]
    sets = list(itertools.combinations(range(experts), k))
    total = 0
    for j in range(dims + 1):
        cells = 1 if j == dims else most_cells(experts, k, dims - j, is_central=False)
        for neurons in itertools.combinations(owner, j):
            holding = sum(set(neurons) <= set(s) for s in sets)
            total += min(holding, cells)
    return total


@pytest.mark.parametrize(
    ("experts", "k", "width", "dims"),
    [
        (4, 2, 3, 2),
        (5, 2, 2, 3),
        (4, 3, 2, 4),
        (6, 1, 3, 3),
        (3, 3, 2, 2),
        (5, 4, 1, 6),
        (4, 2, 2, 0),
    ],
)
def test_the_bound_of_regions_is_the_sum_over_all_subsets_of_neurons(experts, k, width, dims):
    assert most_regions(experts, k, width, dims) == counted_regions(experts, k, width, dims)


def attained(random, experts, k, width):
    """Expert sets with patterns at places beside every crossing of two lines of a plane.

    Every face of an arrangement without parallel lines has a corner.
    """
    weight, bias = random.standard_normal((experts, 2)), random.standard_normal(experts)
    first = random.standard_normal((experts, width, 2))
    offset = random.standard_normal((experts, width))
    pairs = list(itertools.combinations(range(experts), 2))
    normals = [*(weight[i] - weight[j] for i, j in pairs), *first.reshape(-1, 2)]
    levels = [*(bias[i] - bias[j] for i, j in pairs), *offset.ravel()]
    lines = np.column_stack([normals, levels])
    lines /= np.linalg.norm(lines[:, :2], axis=1)[:, None]
    places = []
    for a, b in itertools.combinations(lines, 2):
        corner = np.linalg.solve(np.stack([a[:2], b[:2]]), -np.array([a[2], b[2]]))
        along = np.array([[-a[1], a[0]], [-b[1], b[0]]])
        for s, t in itertools.product((-1.0, 1.0), repeat=2):
            towards = s * along[0] + t * along[1]
            places += [corner + step * towards for step in (1e-7, 1e-5, 1e-3)]
    place = np.array(places)
    chosen = np.sort(np.argsort(-(place @ weight.T + bias), axis=1)[:, :k], axis=1)
    on = np.einsum("pd,end->pen", place, first) + offset > 0.0
    labels = np.take_along_axis(on, chosen[:, :, None], axis=1).reshape(len(place), -1)
    return len(np.unique(np.column_stack([chosen, labels]), axis=0))


def test_random_layers_never_have_more_regions_than_the_bound():
    counts = [attained(np.random.default_rng(seed), 4, 2, 3) for seed in range(60)]
    assert 45 <= max(counts) <= most_regions(4, 2, 3, 2) == 108
    assert published_regions(4, 2, 3, 2).top_k == 132
    alone = [attained(np.random.default_rng(seed), 3, 1, 2) for seed in range(20)]
    assert max(alone) <= most_regions(3, 1, 2, 2) == published_regions(3, 1, 2, 2).top_1


def test_published_counts_are_above_the_bound_by_the_factors_that_are_told():
    assert [most_regions(16, 4, n, 2) for n in (5, 1000)] == [12_373, 129_704_653]
    assert published_regions(16, 4, 5, 2).top_k == 384_020
    np.testing.assert_allclose(published_regions(16, 4, 1000, 2).top_k, 1.456e10, rtol=1e-3)
    assert most_regions(16, 1, 20, 2) == published_regions(16, 1, 20, 2).top_1 == 3376
    for dims, factor in ((2, 113.75), (5, 3.55), (10, 1.25)):
        claimed = math.comb(16, 4) * Fraction(4) ** dims / math.factorial(dims)
        over = claimed / leading_regions(16, 4, 1, dims)
        np.testing.assert_allclose(float(over), factor, atol=0.006)


@pytest.mark.parametrize(("experts", "k"), [(6, 2), (7, 4), (5, 1)])
def test_the_bound_is_between_the_leading_term_and_the_published_count(experts, k):
    for dims in (1, 2, 3, 5):
        ratio = most_regions(experts, k, 10**7, dims) / leading_regions(experts, k, 10**7, dims)
        np.testing.assert_allclose(float(ratio), 1.0, rtol=1e-5)
        assert most_regions(experts, k, 9, dims) <= published_regions(experts, k, 9, dims).top_k
        if k >= dims:  # what a dense layer of all neurons has
            wanted = Fraction((experts * 9) ** dims, math.factorial(dims))
            assert leading_regions(experts, k, 9, dims) == wanted
    assert most_regions(experts, experts, 4, 3) == zaslavsky(4 * experts, 3)
    assert most_regions(experts, k, 4, 0) == leading_regions(experts, k, 4, 0) == 1
    with pytest.raises(ValueError, match="of 0 neurons"):
        most_regions(experts, k, 0, 2)


@pytest.mark.parametrize(("generators", "dims"), [(5, 1), (6, 2), (5, 3)])
def test_a_zonotope_has_the_vertices_that_its_hull_has(generators, dims):
    random = np.random.default_rng(generators)
    lines = random.standard_normal((generators, dims + 1))
    sums = np.array(list(itertools.product((0.0, 1.0), repeat=generators))) @ lines
    assert len(ConvexHull(sums).vertices) == zonotope_vertices(generators, dims)
    assert zaslavsky(generators, dims) <= zonotope_vertices(generators, dims)
    with pytest.raises(ValueError, match="0 generators"):
        zonotope_vertices(0, dims)


@pytest.mark.parametrize(("m", "d"), [(3, 2), (20, 3), (9, 9), (7, 0), (6, 12)])
def test_regions_of_an_arrangement_follow_by_taking_one_hyperplane_away(m, d):
    if d > 0:
        assert zaslavsky(m, d) == zaslavsky(m - 1, d) + zaslavsky(m - 1, d - 1)
    assert zaslavsky(m, d) == 2**m or d < m


def test_the_leading_power_is_far_off_where_neurons_and_dimensions_are_of_one_size():
    with mpmath.workdps(30):
        wanted = 7168 * mpmath.log(16384) - mpmath.loggamma(7169)
        near = mpmath.log(mpmath.mpf(10**6) ** 3 / 6)
    np.testing.assert_allclose(log_leading_zaslavsky(16384, 7168), float(wanted), rtol=1e-13)
    np.testing.assert_allclose(log_leading_zaslavsky(10**6, 3), float(near), rtol=1e-13)
    exact = math.log(zaslavsky(16384, 7168))
    np.testing.assert_allclose(exact, 11224.6187, atol=1e-4)
    assert log_leading_zaslavsky(16384, 7168) > exact + 1800.0
    np.testing.assert_allclose(math.log(zaslavsky(10**6, 3)), float(near), atol=1e-5)


# ------------------------------------------------------------------------------------------- splits
@pytest.mark.parametrize(
    ("experts", "k", "split"), [(8, 2, 4), (64, 8, 4), (512, 10, 8), (5, 5, 3)]
)
def test_the_gain_of_a_split_is_that_of_log_gamma(experts, k, split):
    with mpmath.workdps(40):

        def log_choices(n, r):
            return mpmath.loggamma(n + 1) - mpmath.loggamma(r + 1) - mpmath.loggamma(n - r + 1)

        more = log_choices(split * experts, split * k) - log_choices(experts, k)
        wanted = float(more / mpmath.log(10))
    np.testing.assert_allclose(split_sets_log10(experts, k, split), wanted, rtol=1e-12, atol=1e-12)


def test_a_published_gain_can_be_a_loss_where_sets_become_more():
    np.testing.assert_allclose(split_sets_log10(8, 2, 4), 5.574788, atol=1e-6)
    np.testing.assert_allclose(published_split_log10(8, 2, 4, 10), -0.103503, atol=1e-6)
    np.testing.assert_allclose(split_sets_log10(64, 8, 4), 31.119228, atol=1e-6)
    np.testing.assert_allclose(published_split_log10(64, 8, 4, 10), 25.775597, atol=1e-6)
    assert split_sets_log10(8, 2, 1) == published_split_log10(8, 2, 1, 10) == 0.0
    assert (largest_split(1536, 20), largest_split(4, 5)) == (76, 0)
    for call in (
        lambda: split_sets_log10(4, 5, 2),
        lambda: published_split_log10(4, 2, 0, 1),
        lambda: published_split_log10(4, 2, 2, -1),
        lambda: largest_split(4, 0),
    ):
        with pytest.raises(ValueError, match="dimensions|split into"):
            call()


def test_no_neuron_is_lost_by_a_split():
    """The factor g^-d of the paper is spurious: as many neurons are active."""
    for split in (1, 2, 4, 8):
        sizes = (8 * split, 2 * split, 8 // split, 3)
        assert published_regions(*sizes).dense == published_regions(8, 2, 8, 3).dense


# -------------------------------------------------------------------------------------------- costs
def test_a_recurrent_router_costs_what_the_weights_of_a_gated_cell_are():
    torch = pytest.importorskip("torch")
    found = router_macs(8, 64, 4)
    with torch.device("meta"):
        cell = torch.nn.GRUCell(64, 32, bias=False)
        linear, projector = torch.nn.Linear(64, 8, bias=False), torch.nn.Linear(64, 32, bias=False)
    assert found.gru == sum(p.numel() for p in cell.parameters())
    assert (found.linear, found.projector) == (linear.weight.numel(), projector.weight.numel())
    assert found.cosine == 4 * 64 + 8 * 4
    assert found.sinkhorn == 3 * 8


def test_published_costs_and_weights_are_those_of_the_papers():
    found, printed = router_macs(8, 4096, 128), published_macs(8, 2, 4096, 128)
    assert (found.gru, printed.gru) == (15_728_640, 4_194_304)
    assert (found.projector, printed.projector) == (4_194_304, 524_288)
    assert (printed.experts, printed.sinkhorn) == (33_554_432, 49_152)
    assert expert_parameters(4096, 11008, is_gated=True) * 2 == 270_532_608
    counts = published_parameters(16, 4, 5, 10)
    assert (counts.dense.total, counts.top_1.total, counts.top_k.total) == (50, 800, 800)
    assert (counts.top_k.active, counts.normalised.active, counts.normalised.total) == (
        200,
        50,
        200,
    )
    layer = layer_parameters(16, 4, 10, 5, 7, is_gated=False)
    assert layer.active == 4 * 2 * 50 + 2 * 70 + 160
    assert layer.total - layer.active == 12 * 2 * 50
