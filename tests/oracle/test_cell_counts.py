"""Counts and bounds of cells, faces and regions, graphs and angles of cells, and the max-plus semiring.

Against enumerations, programs, hulls, random draws, other libraries and closed forms.
"""

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations, product

import mpmath
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.sparse.csgraph import connected_components, shortest_path
from scipy.spatial import ConvexHull
from scipy.stats import binom

from moegeom.geometry import capacity
from moegeom.geometry.capacity import (
    expected_diagram,
    first_free_dimension,
    is_every_set_possible,
    most_cells,
    most_regions,
    published_regions,
    published_split_log10,
    split_sets_log10,
    total_cells,
    zaslavsky,
)
from moegeom.geometry.selection import margin, top_k
from moegeom.routing_cells.facet_graph import facet_graph, swaps, visited_graph
from moegeom.routing_cells.walk.enumeration import enumerate_cells
from tests.by_day import by_day
from tests.oracle.exact_cells import exact_cells
from tests.oracle.helpers import choices, exact_logits, moment_router, router


# -------------------------------------------------------------------------------------- hypersimplex
def faces(k, experts):
    """Faces by dimension, as intersections of the facets that Qhull finds."""
    corners = np.array(list(combinations(range(experts), k)))
    points = np.zeros((len(corners), experts))
    np.put_along_axis(points, corners, 1.0, axis=1)
    hull = ConvexHull(points[:, :-1])
    heights = points[:, :-1] @ hull.equations[:, :-1].T + hull.equations[:, -1]
    facets = {frozenset(np.flatnonzero(np.abs(column) < 1e-9).tolist()) for column in heights.T}
    found, new = set(facets), set(facets)
    while new:
        new = {a & b for a in new for b in facets} - found - {frozenset()}
        found |= new
    found.add(frozenset(range(len(points))))
    counts = [0] * experts
    for face in found:
        own = points[sorted(face)]
        counts[np.linalg.matrix_rank(own - own[0])] += 1
    return counts, len(facets)


def face_counts(k, experts):
    """By dimension, from vertices to the polytope itself, a point where there is one set."""
    dims = range(experts) if 0 < k < experts else [0]
    return [capacity.face_count(k, experts, n) for n in dims]


@pytest.mark.parametrize(
    ("k", "experts"), [(k, experts) for experts in (3, 4, 5, 6) for k in range(1, experts)]
)
def test_faces_are_those_that_qhull_has(k, experts):
    counts, facets = faces(k, experts)
    assert face_counts(k, experts) == counts
    assert capacity.num_facets(k, experts) == facets
    assert capacity.num_edges(k, experts) == counts[1]


@pytest.mark.parametrize(("k", "experts"), [(8, 64), (1, 9), (12, 24), (8, 256), (0, 3), (5, 5)])
def test_euler_and_the_corners_hold(k, experts):
    counts = face_counts(k, experts)
    assert sum((-1) ** n * count for n, count in enumerate(counts)) == 1
    assert counts[0] == math.comb(experts, k)
    assert counts[-1] == 1
    assert counts == face_counts(experts - k, experts)
    if 1 < k < experts - 1:
        assert capacity.num_facets(k, experts) == 2 * experts


# -------------------------------------------------------------------------------------------- bounds
def test_regions_follow_deletion_and_restriction_and_faces_have_corners():
    for m, d in product(range(1, 12), range(12)):
        assert zaslavsky(m, d) == zaslavsky(m - 1, d) + (zaslavsky(m - 1, d - 1) if d else 0)
    assert zaslavsky(0, 3) == 1
    for m, d in [(256, 16), (512, 100)]:
        wanted = m * math.log(2) + binom.logcdf(d, m, 0.5)
        assert_allclose(math.log(zaslavsky(m, d)), wanted, 1e-10)
    assert [capacity.face_count(2, 4, n) for n in (-1, 4, 9)] == [0, 0, 0]
    assert (capacity.num_facets(1, 2), capacity.num_facets(1, 1), capacity.num_edges(3, 3)) == (
        2,
        0,
        0,
    )
    with pytest.raises(ValueError, match="top_k 5 of 4"):
        capacity.face_count(5, 4, 1)
    assert_allclose(capacity.log10_count(math.comb(4096, 2048)), 1231.0 + 0.2, 1e-3)
    assert_allclose(capacity.log10_count(10**400), 400.0, 1e-15)
    assert capacity.log10_count(0) == -math.inf


@pytest.mark.parametrize("is_central", [False, True])
@pytest.mark.parametrize(("experts", "dims"), [(6, 2), (7, 3), (5, 1), (6, 5), (4, 6), (6, 4)])
def test_bounds_and_totals_hold_for_enumerated_cells(experts, dims, is_central):
    weight, bias = router(experts, dims, [experts, dims])
    counts = [
        len(exact_cells(weight, None if is_central else bias, k).cells)
        for k in range(1, experts + 1)
    ]
    if dims < experts:
        assert 1 + sum(counts) == total_cells(experts, dims, is_central)
    bounds = [most_cells(experts, k, dims, is_central) for k in range(1, experts + 1)]
    assert all(count <= bound for count, bound in zip(counts, bounds, strict=True))
    if dims >= experts - 1:
        assert counts == bounds


def test_bounds_are_attained_on_a_line_and_on_a_circle_and_grow_until_every_set_is_allowed():
    # of two experts on a line, and of directions of a line
    assert most_cells(2, 1, 1, is_central=False) == 2
    assert [most_cells(6, k, 1, is_central=True) for k in (1, 2, 3)] == [2, 2, 2]
    assert most_cells(64, 8, 0, is_central=False) == most_cells(5, 5, 3, is_central=True) == 1
    # points t, t^2, ... on a curve in four dimensions: every pair of eight wins somewhere
    t = np.arange(8.0)
    moments = np.stack([t, t**2, t**3], axis=1)
    assert len(exact_cells(moments, -(t**4), 2).cells) == most_cells(8, 2, 3, False) == 28
    with pytest.raises(ValueError, match="top_k 0 of 3 experts .* on 2"):
        most_cells(3, 0, 2, is_central=False)
    for experts, k in [(64, 8), (9, 3), (9, 1), (12, 6), (5, 5), (1, 1)]:
        bounds = [most_cells(experts, k, d, is_central=False) for d in range(experts + 2)]
        assert bounds == sorted(bounds)
        free = [d for d, bound in enumerate(bounds) if bound == math.comb(experts, k)]
        assert first_free_dimension(experts, k) == free[0]
    assert first_free_dimension(64, 8) == 7
    assert_allclose(math.log10(most_cells(64, 8, 4, False)), 6.92, atol=0.005)
    assert_allclose(math.log10(math.comb(64, 8)), 9.65, atol=0.005)
    assert [is_every_set_possible(16, 4, dims) for dims in (2, 15, 7)] == [False, True, True]
    with pytest.raises(ValueError, match="top_k 9 of 4"):
        is_every_set_possible(4, 9, 2)
    with pytest.raises(ValueError, match="top_k 9 of 4"):
        first_free_dimension(4, 9)


# ------------------------------------------------------------------------------------------- means
@pytest.mark.parametrize(
    ("experts", "k", "dims", "routers"),
    [(12, 3, 2, 150), (12, 9, 2, 150), (14, 4, 3, 75), (10, 2, 4, 50)],
)
def test_the_mean_diagram_is_that_of_random_routers(experts, k, dims, routers):
    found = []
    for seed in range(routers):
        random = np.random.default_rng([seed, experts])
        mixture = random.standard_normal((dims, dims)) + 2 * np.eye(dims)
        weight = random.standard_normal((experts, dims)) @ mixture + 5.0
        bias = 3.0 * random.standard_normal(experts) + weight.sum(axis=1) - 2.0
        cells = enumerate_cells(weight, bias, k)
        found.append([cells.num_vertices, len(cells.expert_set), len(cells.facets)])
    wanted = expected_diagram(experts, k, dims, is_central=False)
    error = np.std(found, axis=0, ddof=1) / math.sqrt(routers)
    distance = np.mean(found, axis=0) - [wanted.vertices, wanted.cells, wanted.facets]
    assert (np.abs(distance) < 4 * error).all()
    assert (error < 0.06 * np.mean(found, axis=0)).all()


@pytest.mark.parametrize(("experts", "k", "dims", "routers"), [(7, 2, 3, 15), (9, 3, 2, 30)])
def test_the_mean_of_central_routers_is_that_of_enumerated_ones(experts, k, dims, routers):
    found = []
    for seed in range(routers):
        weight = np.random.default_rng([seed, dims]).standard_normal((experts, dims))
        cells = exact_cells(weight, None, k)
        found.append([len(cells.cells), len(cells.facets)])
    wanted = expected_diagram(experts, k, dims, is_central=True)
    error = np.std(found, axis=0, ddof=1) / math.sqrt(routers)
    assert (np.abs(np.mean(found, axis=0) - [wanted.cells, wanted.facets]) < 4 * error).all()


@pytest.mark.parametrize(("experts", "dims"), [(6, 2), (9, 3), (24, 4), (64, 3)])
def test_means_of_all_orders_sum_to_the_total(experts, dims):
    for is_central in (False, True):
        means = [expected_diagram(experts, k, dims, is_central) for k in range(1, experts + 1)]
        total = 1 + sum(mean.cells for mean in means)
        assert_allclose(total, total_cells(experts, dims, is_central), 1e-11)
        vertices = sum(mean.vertices for mean in means)
        orders = dims - is_central  # every vertex has as many orders as its diagram dimensions
        most = 2 * math.comb(experts, dims) if is_central else math.comb(experts, dims + 1)
        assert_allclose(vertices, orders * most, 1e-11)


def test_means_are_counts_where_there_is_no_choice():
    for experts, k in [(5, 2), (8, 1), (8, 5), (12, 6)]:
        for dims in (experts - 1, experts + 3):
            for is_central in (False, True):
                mean = expected_diagram(experts, k, dims, is_central)
                assert_allclose(mean.cells, math.comb(experts, k), 1e-11)
                assert_allclose(mean.facets, capacity.num_edges(k, experts), 1e-11)
    assert expected_diagram(5, 5, 3, False).cells == expected_diagram(5, 2, 0, True).cells == 1.0
    line = expected_diagram(5, 2, 1, is_central=True)
    assert (line.vertices, line.cells, line.facets) == (0.0, 2.0, 1.0)
    plane = expected_diagram(40, 5, 2, is_central=False)  # V - facets + cells = 1
    assert_allclose(plane.vertices - plane.facets + plane.cells, 1.0, 0, 1e-9)
    with pytest.raises(ValueError, match="top_k 6 of 5"):
        expected_diagram(5, 6, 1, is_central=False)


# -------------------------------------------------------------------------------------------- cells
@pytest.mark.parametrize(("experts", "k"), [(9, 3), (7, 1), (8, 4), (9, 6)])
def test_every_set_is_a_cell_of_the_moment_router(experts, k):
    """At the coefficients of a polynomial with double roots, in rational numbers."""
    weight, bias = moment_router(experts, k)
    least = min(k, experts - k)
    assert weight.shape == (experts, 2 * least - 1)
    assert is_every_set_possible(experts, k, 2 * least - 1)
    t = [Fraction(row[0]) if k == least else -Fraction(row[0]) for row in weight.tolist()]
    for few in combinations(range(experts), least):
        polynomial = [Fraction(1)]
        for s in few:  # times (x - t_s)^2, lowest power first
            for _ in range(2):
                shifted = [Fraction(0), *polynomial]
                polynomial = [a - t[s] * b for a, b in zip(shifted, [*polynomial, 0], strict=True)]
        place = [-c for c in polynomial[1:-1]]
        logits = exact_logits(weight, bias, place)
        chosen = few if k == least else tuple(i for i in range(experts) if i not in few)
        rest = [logits[j] for j in range(experts) if j not in chosen]
        assert min(logits[i] for i in chosen) - max(rest) > 1e-5 * max(map(abs, logits))


def chance_to_be_over_the_mean(n, p):
    """By quadrature with many digits where the integrand oscillates."""
    with mpmath.workdps(4 * n):
        factor = mpmath.sqrt(n / (2 * mpmath.pi)) * mpmath.binomial(n, p)

        def integrand(s):
            half = mpmath.erfc(-1j * s / mpmath.sqrt(2)) / 2
            other = mpmath.erfc(1j * s / mpmath.sqrt(2)) / 2
            return mpmath.re(mpmath.exp(-n * s * s / 2) * half**p * other ** (n - p))

        return 2 * factor * mpmath.quad(integrand, [0, 0.5, 1, 2, 3, 5, 8, 14])


@pytest.mark.parametrize(("experts", "k"), by_day([(20, 8), (9, 2)], [(9, 2)]))
def test_one_dimension_below_all_a_gaussian_router_lacks_the_share_of_one_event(experts, k):
    r"""C(E, k) less the chance that k of E Gaussians are over their mean: one cell at most."""
    found = math.comb(experts, k) - expected_diagram(experts, k, experts - 2, False).cells
    wanted = float(chance_to_be_over_the_mean(experts, k))
    assert_allclose(found, wanted, rtol=1e-6, atol=1e-12 * math.comb(experts, k))


@pytest.mark.parametrize("k", [1, 2])
def test_on_a_hundred_dimensions_every_pair_of_512_gaussian_experts_is_a_cell(k):
    """Convex hulls of that many Gaussian points in that many dimensions are neighbourly."""
    mean = expected_diagram(512, k, 100, is_central=False).cells
    assert_allclose(mean, math.comb(512, k), rtol=1e-9)


# ------------------------------------------------------------------------------------------ regions
def counted_regions(experts, k, width, dims):
    """The definition of the bound, subset by subset of all neurons."""
    owner = [expert for expert in range(experts) for _ in range(width)]
    sets = list(combinations(range(experts), k))
    total = 0
    for j in range(dims + 1):
        cells = 1 if j == dims else most_cells(experts, k, dims - j, is_central=False)
        for neurons in combinations(owner, j):
            holding = sum(set(neurons) <= set(s) for s in sets)
            total += min(holding, cells)
    return total


@pytest.mark.parametrize(
    ("experts", "k", "width", "dims"),
    [(4, 2, 3, 2), (5, 2, 2, 3), (4, 3, 2, 4), (6, 1, 3, 3), (3, 3, 2, 2), (5, 4, 1, 6), (4, 2, 2, 0)],
)  # fmt: skip
def test_the_bound_of_regions_is_the_sum_over_all_subsets_of_neurons(experts, k, width, dims):
    assert most_regions(experts, k, width, dims) == counted_regions(experts, k, width, dims)


def attained(random, experts, k, width):
    """Expert sets with patterns at places beside every crossing of two lines of a plane.

    Every face of an arrangement without parallel lines has a corner.
    """
    weight, bias = random.standard_normal((experts, 2)), random.standard_normal(experts)
    first = random.standard_normal((experts, width, 2))
    offset = random.standard_normal((experts, width))
    pairs = list(combinations(range(experts), 2))
    normals = [*(weight[i] - weight[j] for i, j in pairs), *first.reshape(-1, 2)]
    levels = [*(bias[i] - bias[j] for i, j in pairs), *offset.ravel()]
    lines = np.column_stack([normals, levels])
    lines /= np.linalg.norm(lines[:, :2], axis=1)[:, None]
    places = []
    for a, b in combinations(lines, 2):
        corner = np.linalg.solve(np.stack([a[:2], b[:2]]), -np.array([a[2], b[2]]))
        along = np.array([[-a[1], a[0]], [-b[1], b[0]]])
        for s, t in product((-1.0, 1.0), repeat=2):
            towards = s * along[0] + t * along[1]
            places += [corner + step * towards for step in (1e-7, 1e-5, 1e-3)]
    place = np.array(places)
    chosen = choices(place, weight, bias, k)
    on = np.einsum("pd,end->pen", place, first) + offset > 0.0
    labels = np.take_along_axis(on, chosen[:, :, None], axis=1).reshape(len(place), -1)
    return len(np.unique(np.column_stack([chosen, labels]), axis=0))


def test_regions_of_random_layers_and_published_counts_keep_to_the_bound():
    counts = [attained(np.random.default_rng(seed), 4, 2, 3) for seed in range(60)]
    assert 45 <= max(counts) <= most_regions(4, 2, 3, 2) == 108
    assert published_regions(4, 2, 3, 2).top_k == 132
    alone = [attained(np.random.default_rng(seed), 3, 1, 2) for seed in range(20)]
    assert max(alone) <= most_regions(3, 1, 2, 2) == published_regions(3, 1, 2, 2).top_1
    assert most_regions(16, 4, 1000, 2) == 129_704_653
    assert_allclose(published_regions(16, 4, 1000, 2).top_k, 1.456e10, rtol=1e-3)


@pytest.mark.parametrize(("experts", "k"), [(6, 2), (7, 4), (5, 1)])
def test_the_bound_is_at_most_the_published_count_and_grows_as_a_dense_layer(experts, k):
    for dims in (1, 2, 3, 5):
        assert most_regions(experts, k, 9, dims) <= published_regions(experts, k, 9, dims).top_k
        if k >= dims:  # what a dense layer of all neurons has
            dense = Fraction((experts * 10**7) ** dims, math.factorial(dims))
            assert_allclose(float(most_regions(experts, k, 10**7, dims) / dense), 1.0, rtol=1e-5)
    assert most_regions(experts, experts, 4, 3) == zaslavsky(4 * experts, 3)
    assert most_regions(experts, k, 4, 0) == 1
    with pytest.raises(ValueError, match="of 0 neurons"):
        most_regions(experts, k, 0, 2)


def test_published_powers_gains_and_costs_are_those_of_the_papers():
    leading = 7168 * math.log(16384) - math.lgamma(7169)
    assert leading > math.log(zaslavsky(16384, 7168)) + 1800.0
    assert_allclose(math.log(zaslavsky(10**6, 3)), math.log(10**18 / 6), atol=1e-5)
    assert_allclose(published_split_log10(64, 8, 4, 10), 25.775597, atol=1e-6)
    assert split_sets_log10(8, 2, 1) == published_split_log10(8, 2, 1, 10) == 0.0
    for function, *sizes in (
        (split_sets_log10, 4, 5, 2),
        (published_split_log10, 4, 2, 0, 1),
        (published_split_log10, 4, 2, 2, -1),
    ):
        with pytest.raises(ValueError, match="dimensions|split into"):
            function(*sizes)
    assert capacity.expert_parameters(4096, 11008, is_gated=True) * 2 == 270_532_608
    counts = capacity.published_parameters(16, 4, 5, 10)
    totals = counts.dense.total, counts.top_1.total, counts.top_k.total, counts.normalised.total
    assert totals == (50, 800, 800, 200)
    assert (counts.top_k.active, counts.normalised.active) == (200, 50)
    for split in (1, 2, 4, 8):  # no neuron is lost by a split: the factor g^-d is spurious
        sizes = (8 * split, 2 * split, 8 // split, 3)
        assert published_regions(*sizes).dense == published_regions(8, 2, 8, 3).dense
    layer = capacity.layer_parameters(16, 4, 10, 5, 7, is_gated=False)
    assert layer.active == 4 * 2 * 50 + 2 * 70 + 160
    assert layer.total - layer.active == 12 * 2 * 50


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
    assert_allclose(split_sets_log10(experts, k, split), wanted, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------- facet graph
@pytest.mark.parametrize("cells", [65, 300, 700])
@pytest.mark.parametrize("degree", [0.8, 1.5, 3.0, 12.0])
def test_diameter_degrees_and_pieces_are_those_of_scipys_graphs(cells, degree):
    """Sparse ones have long arms and fall into pieces, of dense ones most cells are searched."""
    random = np.random.default_rng(cells)
    facets = np.unique(np.sort(random.integers(0, cells, (int(degree * cells), 2))), axis=0)
    facets = facets[facets[:, 0] < facets[:, 1]]
    matrix = np.zeros((cells, cells))
    matrix[facets[:, 0], facets[:, 1]] = 1
    matrix += matrix.T
    method = "FW" if cells <= 300 else "auto"  # Floyd and Warshall
    steps = shortest_path(matrix, method, directed=False, unweighted=True)
    num_facets = matrix.sum(axis=0)
    graph = facet_graph(cells, facets)
    assert graph.is_diameter_exact
    assert graph.diameter == steps[np.isfinite(steps)].max()
    assert graph.num_components == connected_components(matrix)[0]
    assert graph.degrees == (num_facets.min(), pytest.approx(num_facets.mean()), num_facets.max())
    for most_passed in (10, len(facets), 10 * len(facets), 50 * len(facets)):
        bound = facet_graph(cells, facets, most_passed)
        assert graph.diameter / 2 <= bound.diameter <= graph.diameter
        assert bound.diameter == graph.diameter or not bound.is_diameter_exact


def test_worked_graphs_have_their_pieces_swaps_and_most_visited_sets():
    cells = np.array([[0, 1], [0, 2], [2, 3], [4, 5], [6, 7]])
    facets = np.array([[0, 1], [1, 2], [0, 2]])
    graph = facet_graph(len(cells), facets)
    assert (graph.num_components, graph.diameter) == (3, 1)
    swapped = swaps(cells, facets)
    assert swapped.num.tolist() == [1, 1, 2]
    assert (swapped.out.tolist(), swapped.into.tolist()) == ([1, 0, 0, 1], [2, 3, 2, 3])
    assert [part.tolist() for part in swapped.first] == [[1, 0, 0], [2, 3, 2]]
    lonely = facet_graph(1, facets[:0])
    assert (lonely.diameter, lonely.degrees) == (0, (0, 0.0, 0))
    with pytest.raises(ValueError, match="no cells"):
        facet_graph(0, facets[:0])
    chosen = np.array([[0, 1], [2, 3], [1, 0], [4, 5], [5, 4], [0, 2], [2, 3], [3, 2]])
    found = visited_graph(chosen, most_slots=4)
    assert (found.num_expert_sets, found.is_whole) == (4, False)
    assert found.num_components == 2  # [0, 2], which joins them, is left out
    assert found.largest_share == 3 / 8
    assert found.shares == (3 / 8, 5 / 8, 1.0)
    assert visited_graph(chosen).num_components == 2
    found = visited_graph(np.empty((0, 3), np.int32))
    assert (found.num_components, found.num_edges, found.num_expert_sets) == (0, 0, 0)
    assert np.isnan(found.largest_share)


# --------------------------------------------------------------------------- visited expert sets
@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(300, 9, 3), (300, 40, 2), (50, 6, 1), (400, 16, 6), (1, 5, 2)]
)
def test_neighbours_and_pieces_are_those_of_all_pairs(tokens, experts, k):
    random = np.random.default_rng(experts)
    chosen = np.array([random.permutation(experts)[:k] for _ in range(tokens)])
    found = visited_graph(chosen)
    counts = Counter(frozenset(row) for row in chosen.tolist())
    sets = sorted(counts, key=sorted)
    pairs = combinations(range(len(sets)), 2)
    expected = [[i, j] for i, j in pairs if len(sets[i] & sets[j]) == k - 1]
    assert (found.num_expert_sets, found.num_edges) == (len(sets), len(expected))
    label = list(range(len(sets)))
    for i, j in expected:
        label = [label[i] if x == label[j] else x for x in label]
    assert found.num_components == len(set(label))
    per_piece = Counter()
    for some, piece in zip(sets, label, strict=True):
        per_piece[piece] += counts[some]
    assert found.largest_share == max(per_piece.values()) / tokens
    assert found.is_whole


# ----------------------------------------------------------------------------------------- max-plus
#: Numbers whose sums are exact.
LOGITS = np.random.default_rng(4).integers(-8, 8, (400, 6)).astype(np.float64)


def test_the_k_largest_logits_are_the_k_least_power_distances():
    """Of sites w_i with the weights |w_i|^2 + 2 b_i (Aurenhammer 1987; docs/theory.md B1)."""
    weight, bias = router(7, 3)
    points = np.random.default_rng(1).standard_normal((200, 3))
    logits = points @ weight.T + bias
    apart = ((points[:, None, :] - weight) ** 2).sum(axis=2)
    distances = apart - ((weight**2).sum(axis=1) + 2.0 * bias)
    assert_allclose(distances, (points**2).sum(1)[:, None] - 2.0 * logits, atol=1e-12)
    assert_array_equal(np.sort(top_k(logits, 3)), np.sort(top_k(-distances, 3)))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_margin_is_zero_where_two_terms_of_the_tropical_polynomial_attain_the_maximum(k):
    """The k-th elementary symmetric polynomial in max-plus has one term for each set of k."""
    sets = np.array([[i in s for i in range(6)] for s in combinations(range(6), k)])
    terms = np.sort(LOGITS @ sets.T, axis=1)
    chosen = np.take_along_axis(LOGITS, top_k(LOGITS, k), axis=1).sum(axis=1)
    assert_array_equal(chosen, terms[:, -1])
    assert_array_equal(terms[:, -1] == terms[:, -2], margin(LOGITS, k) == 0.0)
    assert 0.1 < (margin(LOGITS, k) == 0.0).mean() < 0.9
