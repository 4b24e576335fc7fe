"""Oracles: instances whose every answer has an exact certificate, exact arithmetic, Qhull, HiGHS."""

import hashlib
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from scipy.spatial import ConvexHull

from moegeom.routing_cells.exact.dictionary import (
    Arrangement,
    dictionary,
    independent_columns_of,
    num_parallel,
)
from moegeom.routing_cells.walk import enumeration
from moegeom.routing_cells.walk._level_vertex import UNORDERED
from moegeom.routing_cells.walk.enumeration import AllSubsets, Enumeration, enumerate_cells
from tests.by_day import IS_NIGHT, by_day
from tests.oracle import helpers
from tests.oracle.exact_cells import ExactCells, exact_cells, expert_sets, independent_columns
from tests.oracle.helpers import INSTANCES, arrays, choices, digest, named, router, rows_of

SHA256 = "43c9ae4e2a1203961ddc3d256065c87343c9d4437f28d15e8fe075fbfbb92749"
#: By day those of few cells.
QUICK = [instance for instance in helpers.SMALL if instance["n_cells"] <= 40]


def test_the_instances_are_the_certified_ones_and_complements_swap_signs():
    assert hashlib.sha256(helpers.TRUTH.read_bytes()).hexdigest() == SHA256
    assert len({instance["name"] for instance in INSTANCES}) == len(INSTANCES)
    weight, bias = np.array([[1.0], [1.0], [-1.0]]), np.zeros(3)
    assert expert_sets(exact_cells(weight, bias, 1)) == [(2,)]
    assert expert_sets(exact_cells(weight, bias, 1, tie_broken=True)) == [(0,), (2,)]
    weight, bias = router(6, 2, 4)
    most = expert_sets(exact_cells(weight, bias, 4))
    least = expert_sets(exact_cells(-weight, -bias, 2))
    assert most == sorted(tuple(sorted(set(range(6)) - set(cell))) for cell in least)
    with pytest.raises(ValueError, match="7 of 6"):
        exact_cells(weight, bias, 7)


@pytest.mark.parametrize(
    "instance", by_day(helpers.WHOLE, QUICK), ids=lambda instance: instance["name"]
)
def test_cells_and_facets_are_the_certified_ones(instance):
    weight, bias = arrays(instance)
    found = exact_cells(weight, bias, instance["k"])
    cells = expert_sets(found)
    assert len(cells) == instance["n_cells"]
    assert digest(cells) == instance["cells_sha1"]
    assert len(found.facets) == instance["n_walls"]
    swaps = [pair for pair in found.facets if len(pair[0] - pair[1]) == 1]
    assert len(swaps) == instance["n_swap_walls"]
    assert bias is not None or found.unbounded == set(found.cells)


@pytest.mark.parametrize("seed", range(6))
def test_columns_of_float_rows_are_those_of_fractions(seed):
    generator = np.random.default_rng(seed)
    weight = generator.integers(-2, 3, (6, 8)) * 2.0 ** generator.integers(-30, 30, (6, 8))
    weight[3] = weight[2]
    weight[:, 2] = weight[:, 0]
    exact = independent_columns(helpers.in_fractions(weight))
    assert independent_columns_of(weight) == exact


# ----------------------------------------------------------------------------------------- the walk
def pairs(walk: Enumeration) -> set[frozenset[tuple[int, ...]]]:
    return {frozenset(pair) for pair in named(walk)[1]}


@pytest.mark.parametrize("instance", helpers.WHOLE, ids=lambda instance: instance["name"])
def test_cells_and_facets_of_the_walk_are_the_certified_ones(instance):
    weight, bias = arrays(instance)
    found = enumerate_cells(weight, bias, instance["k"])
    if isinstance(found, AllSubsets):
        assert found.num_cells == instance["n_cells"]
        return
    assert digest(rows_of(found.expert_set)) == instance["cells_sha1"]
    assert len(found.facets) == len(pairs(found)) == instance["n_walls"]
    assert found.is_whole


@pytest.mark.parametrize(
    ("experts", "k", "dims", "is_affine", "road"),
    [
        (9, 3, 1, True, "sweep"),
        (9, 3, 2, True, "walk"),
        (9, 3, 3, True, "walk"),
        (9, 7, 2, True, "walk"),
        (9, 7, 3, False, "charts"),
        (9, 3, 2, False, "sweep"),
        (10, 4, 3, False, "charts"),
        (10, 1, 4, True, "walk"),
        (10, 9, 3, True, "walk"),
    ],
)
def test_every_road_leads_to_what_exact_arithmetic_finds(experts, k, dims, is_affine, road):
    weight, bias = router(experts, dims, experts + k + dims)
    bias = bias if is_affine else None
    found = enumerate_cells(weight, bias, k)
    assert found.road == road
    exact = exact_cells(weight, bias, k)
    assert rows_of(found.expert_set) == expert_sets(exact)
    assert pairs(found) == {frozenset(tuple(sorted(c)) for c in pair) for pair in exact.facets}
    bounded = [cell not in exact.unbounded for cell in sorted(exact.cells, key=sorted)]
    assert found.is_bounded.tolist() == bounded
    assert_array_equal(choices(found.witness, weight, bias, k), found.expert_set)


def test_columns_that_depend_on_others_and_threads_change_no_cell_of_the_walk():
    generator = np.random.default_rng(4)
    weight = generator.integers(-4, 5, (9, 2)).astype(np.float64)
    bias = generator.standard_normal(9)
    wide = np.column_stack([weight, weight @ [1.0, 2.0], np.ones(9)])
    narrow, found = enumerate_cells(weight, bias, 3), enumerate_cells(wide, bias, 3)
    assert named(found) == named(narrow)
    assert not found.is_bounded.any()
    assert_array_equal(choices(found.witness, wide, bias, 3), found.expert_set)
    weight, bias = router(40, 4, 8)
    one = enumerate_cells(weight, bias, 5)
    two = enumerate_cells(weight, bias, 5, threads=2)
    assert one.num_vertices > 1024
    assert_array_equal(one.expert_set, two.expert_set)
    assert_array_equal(one.facets, two.facets)


def test_a_direction_that_float64_cannot_order_changes_no_cell_and_no_facet(monkeypatch):
    weight, bias = router(9, 3)
    whole, walk = enumerate_cells(weight, bias, 3), enumeration.level_walk

    def unordered(*arguments):
        return replace(w := walk(*arguments), rising=(w.rising // 2) | UNORDERED)

    monkeypatch.setattr(enumeration, "level_walk", unordered)
    found = enumerate_cells(weight, bias, 3)
    for name in ("expert_set", "is_bounded", "facets"):
        assert_array_equal(getattr(found, name), getattr(whole, name))
    assert_array_equal(choices(found.witness, weight, bias, 3), whole.expert_set)


def test_wide_routers_have_every_subset_and_ranks_are_certified():
    generator = np.random.default_rng(0)
    found = enumerate_cells(generator.standard_normal((64, 200)), None, 8)
    assert isinstance(found, AllSubsets)
    assert found.num_cells == 4426165368
    weight = np.array([[3.0], [1.0], [-2.0]])
    found = enumerate_cells(weight, None, 1)
    assert rows_of(found.expert_set) == [(0,), (2,)]
    assert found.facets.tolist() == [[0, 1]]
    assert len(exact_cells(weight, None, 1).facets) == 1
    weight = np.random.default_rng(0).standard_normal((64, 2048))
    assert independent_columns_of(weight) == list(range(63))
    weight[7] = weight[3]
    with pytest.raises(ValueError, match="rank 62 modulo a prime, below the 63"):
        independent_columns_of(weight)
    assert independent_columns_of(np.ones((1, 3))) == []


def test_equal_rows_have_one_cell_and_vertices_at_which_others_tie_are_settled_in_integers():
    def cells(bias, k, **options):
        return rows_of(enumerate_cells(np.ones((4, 3)), bias, k, **options).expert_set)

    tied = np.array([3.0, 1.0, 1.0, 0.0])
    assert cells(np.array([3.0, 1.0, 2.0, 0.0]), 2) == [(0, 2)]
    assert cells(tied, 2) == []
    assert cells(tied, 2, tie_broken=True) == [(0, 1)]
    assert cells(None, 4) == [(0, 1, 2, 3)]
    weight, bias = router(32, 3, 1)
    for offset in (bias, None):
        found = enumerate_cells(weight, offset, 4, most=50)
        assert not found.is_whole
        assert len(found.expert_set) == 0
    for k in (0, 5):
        with pytest.raises(ValueError, match="of 4 experts"):
            enumerate_cells(np.ones((4, 2)), None, k)
    with pytest.raises(ValueError, match="not finite"):
        enumerate_cells(np.array([[1.0], [np.nan]]), None, 1)
    weight, bias = router(14, 2, 5)
    weight[1], bias[1] = weight[0], bias[0]
    found = assert_is_exact(weight, bias, 3, tie_broken=False)
    assert found.road == "walk"
    assert 0 < found.num_exact < found.num_vertices


def instance(seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """A random size of at most 14 experts and 4 dimensions."""
    generator = np.random.default_rng(seed)
    experts, dims = int(generator.integers(6, 15)), int(generator.integers(2, 5))
    k = int(generator.integers(1, experts))
    return generator.standard_normal((experts, dims)), generator.standard_normal(experts), k


@pytest.mark.parametrize("seed", range(6))
def test_cells_are_the_upper_vertices_of_qhulls_polytope_of_sums(seed):
    weight, bias, k = instance(seed)
    lifted = np.column_stack([weight, bias])
    sets = list(combinations(range(len(bias)), k))
    sums = np.array([lifted[list(some)].sum(axis=0) for some in sets])
    hull = ConvexHull(sums)
    # (x, 1) is normal to a face of the sets that are largest at x: faces that look upwards
    upper = hull.simplices[hull.equations[:, -2] > 1e-9]
    cells = rows_of(enumerate_cells(weight, bias, k).expert_set)
    assert sorted(sets[n] for n in np.unique(upper)) == cells


# ------------------------------------------------------------------------------ instances with ties
TIED = ["integers", "duplicates", "equal rows", "grid", "collinear", "scales"]


def tied(kind, generator, experts, dims):
    """A router in which experts tie."""
    rows = generator.integers(-2, 3, (experts, dims)).astype(np.float64)
    bias = generator.integers(-2, 3, experts).astype(np.float64)
    match kind:
        case "duplicates":
            rows += generator.standard_normal(rows.shape)
            for one, other in generator.choice(experts, (2, 2), replace=False):
                rows[one], bias[one] = rows[other], bias[other]
        case "equal rows":
            rows, bias = rows + generator.random(rows.shape), bias + generator.random(experts)
            rows[generator.permutation(experts)[:3]] = rows[0]
        case "grid":
            rows = np.abs(rows)
            bias = -0.5 * (rows**2).sum(axis=1)
        case "collinear":
            rows[2:4] = rows[0] + np.array([[2.0], [3.0]]) * (rows[1] - rows[0])
            bias[2] = bias[0] + 2.0 * (bias[1] - bias[0])
        case "scales":
            rows = np.sign(rows) * np.array([1.0, 1e-3, 7.0])[:dims]
            bias = np.where(bias < 0.5, 0.0, generator.standard_normal(experts))
    return rows, bias


def open_cells(exact: ExactCells, weight, bias) -> set[frozenset[int]]:
    """The cells in which none ties with one that is left out, but for equal experts in order."""
    lifted = np.column_stack([weight, bias])
    cells = set()
    for cell, point in exact.cells.items():
        values = helpers.exact_logits(weight, bias, point)
        if all(
            values[i] > values[j] or ((lifted[i] == lifted[j]).all() and i < j)
            for i, j in product(cell, set(range(len(weight))) - cell)
        ):
            cells.add(cell)
    return cells


def assert_is_exact(weight, bias, k, tie_broken) -> Enumeration | None:
    """Cells, facets and ends are those of the exact walk, and witnesses lie in their cells."""
    walk = enumerate_cells(weight, bias, k, tie_broken=tie_broken)
    if isinstance(walk, AllSubsets):
        return None
    exact = exact_cells(weight, bias, k, tie_broken)
    offsets = np.zeros(len(weight)) if bias is None else bias
    cells = open_cells(exact, weight, offsets)
    rows = [frozenset(row) for row in walk.expert_set.tolist()]
    assert rows == sorted(cells, key=sorted)
    facets = {(rows[one], rows[other]) for one, other in walk.facets.tolist()}
    assert len(facets) == len(walk.facets)
    assert facets == {pair for pair in exact.facets if cells.issuperset(pair)}
    assert walk.is_bounded.tolist() == [cell not in exact.unbounded for cell in rows]
    broken = open_cells(exact_cells(weight, bias, k, tie_broken=True), weight, offsets)
    assert [frozenset(row) for row in walk.tied.tolist()] == sorted(broken - cells, key=sorted)
    assert exact.tied == broken - cells
    assert_array_equal(choices(walk.witness, weight, offsets, k), walk.expert_set)
    return walk


#: By day each kind, in two or in three dimensions.
INSTANCES_WITH_TIES = by_day(product(TIED, range(20)), [(k, n % 2) for n, k in enumerate(TIED)])


@pytest.mark.parametrize(("kind", "seed"), INSTANCES_WITH_TIES)
def test_cells_and_facets_of_instances_with_ties_are_those_of_the_exact_walk(kind, seed):
    generator = np.random.default_rng([seed, *kind.encode()])
    dims = 2 + seed % 2
    experts = int(generator.integers(dims + 3, 9 - dims // 3))
    weight, bias = tied(kind, generator, experts, dims)
    for k in range(1, experts, 1 if IS_NIGHT else 2):
        assert_is_exact(weight, bias, k, tie_broken=(k + seed) % 2 == 0)


#: Of the corners of a cube two differ in each coordinate alone: the chart is mixed from all, or
#: where float64 cannot hold it the whole diagram is walked.
CENTRAL = list(product(["integers", "equal rows", "collinear", "cube", "rounded"], [False, True]))
CUBES = {"cube": [1.0, 1.0, 1.0], "rounded": [1.0, 2.0**60, 2.0**-60]}


@pytest.mark.parametrize(("kind", "tie_broken"), by_day(CENTRAL, [*CENTRAL[:6:3], *CENTRAL[4::2]]))
def test_so_are_those_of_central_routers(kind, tie_broken):
    if kind in CUBES:
        weight = np.array(list(product((0.0, 1.0), repeat=3))) * CUBES[kind]
        assert (enumeration._chart(weight) is None) == (kind == "rounded")
    else:
        weight, _ = tied(kind, np.random.default_rng(len(kind)), 7, 3)
    for k in (2, 3, 5) if IS_NIGHT else (2, 5):
        assert_is_exact(weight, None, k, tie_broken)


def dot(one, other) -> Fraction:
    return sum((a * b for a, b in zip(one, other, strict=True)), Fraction(0))


def inverse_of(rows):
    """Of three rows, by their cross products; None where they depend on one another."""
    a, b, c = np.array(rows)
    columns = np.array([np.cross(b, c), np.cross(c, a), np.cross(a, b)])
    return (columns.T / (a @ columns[0])).tolist() if a @ columns[0] else None


@pytest.mark.parametrize("kind", TIED)
def test_a_dictionary_in_integers_is_the_one_in_fractions(kind):
    weight, bias = tied(kind, np.random.default_rng(3), 7, 2)
    rows, offsets = helpers.in_fractions(weight), helpers.in_fractions(bias)
    arrangement = Arrangement(rows, offsets)
    lifted = [[*row, Fraction(-1)] for row in rows]
    # ties as if the bias of a lower number were larger by more
    nudged = [b + Fraction(1, 10 ** (60 * (1 + j))) for j, b in enumerate(offsets)]
    for on in combinations(range(7), 3):
        ours, inverse = dictionary(arrangement, on), inverse_of([lifted[i] for i in on])
        assert (ours is None) == (inverse is None)
        if ours is None:
            continue
        levels, moved = ([-dot(r, [b[i] for i in on]) for r in inverse] for b in (offsets, nudged))
        assert ours.point() == tuple(levels[:-1])
        f = [dot(row, levels) + offset for row, offset in zip(lifted, offsets, strict=True)]
        assert ours.tied == {j for j in range(7) if f[j] == 0}
        assert {j for j in range(7) if f[j] > 0} <= ours.above
        pushed = [dot(row, moved) + offset for row, offset in zip(lifted, nudged, strict=True)]
        assert ours.above == {j for j in range(7) if j not in on and pushed[j] > 0}
        for column, upwards in product(range(3), (False, True)):
            way = [row[column] for row in inverse]
            assert ours.direction(column, upwards) == tuple(a if upwards else -a for a in way[:-1])
            met = {}
            for j in set(range(7)).difference(on):
                rate = dot(lifted[j], way)
                if rate != 0 and (-pushed[j] / rate > 0) == upwards:
                    met[j] = abs(pushed[j] / rate)
            assert ours.shot(column, upwards) == min(met, key=met.__getitem__, default=None)


def concurrent_points(weight: np.ndarray, bias: np.ndarray, k: int) -> int:
    """Points of a plane where more than three experts tie for the last place, from all triples."""
    rows = [[Fraction(int(v)) for v in (*row, b)] for row, b in zip(weight, bias, strict=True)]
    points = set()
    for one, other, third in combinations(rows, 3):
        (a, b, e), (c, d, f) = (
            [u - v for u, v in zip(one, another, strict=True)] for another in (other, third)
        )
        if (area := a * d - b * c) != 0:
            points.add(((b * f - d * e) / area, (c * e - a * f) / area))
    count = 0
    for x, y in points:
        values = [row[0] * x + row[1] * y + row[2] for row in rows]
        for level in set(values):
            above, tied = sum(v > level for v in values), values.count(level)
            count += tied > 3 and above < k < above + tied
    return count


def parallel_planes(weight, bias, pairs):
    """By all pairs of planes of whole numbers: the rank of their normals, and with their places."""
    rows = [[*(weight[i] - weight[j]), bias[j] - bias[i]] for i, j in pairs]
    planes = []
    for row in np.array(rows):
        if row[:-1].any() and all(np.linalg.matrix_rank([row, other]) > 1 for other in planes):
            planes.append(row)
    return sum(
        any(one is not two and np.linalg.matrix_rank([one[:-1], two[:-1]]) == 1 for two in planes)
        for one in planes
    )


def test_parallel_boundaries_are_those_of_all_pairs_of_planes():
    counts = []
    for seed in range(6):
        generator = np.random.default_rng(seed)
        weight = generator.integers(-2, 3, (7, 2 + seed % 2)).astype(np.float64)
        bias = generator.integers(-2, 3, 7).astype(np.float64)
        pairs = list(combinations(range(7), 2))
        counts.append(parallel_planes(weight, bias, pairs))
        assert num_parallel(weight, bias, pairs) == counts[-1]
        weight, bias = router(9, 2, seed)
        assert num_parallel(weight, bias, pairs) == 0
    assert sum(counts) > 8
    assert num_parallel(np.arange(3.0)[:, None], np.zeros(3), [(0, 1), (1, 2)]) == 0


def test_points_where_too_many_experts_tie_are_those_of_all_triples():
    counts = []
    for seed in range(8):
        generator = np.random.default_rng(seed)
        weight = generator.integers(-2, 3, (9, 2)).astype(np.float64)
        bias = generator.integers(-2, 3, 9).astype(np.float64)
        found = enumerate_cells(weight, bias, 3)
        assert found.road == "walk"
        counts.append(concurrent_points(weight, bias, 3))
        assert found.num_concurrent == counts[-1]
        weight, bias = router(9, 2, seed)
        assert enumerate_cells(weight, bias, 3).num_concurrent == 0
    assert sum(counts) > 8
