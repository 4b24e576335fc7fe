"""Counts of faces and cells against enumerations, and means against random routers."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial import ConvexHull
from scipy.stats import binom

from moegeom.geometry.capacity.cell_bounds import (
    expected_diagram,
    log_zaslavsky,
    most_cells,
    most_cells_none_hidden,
    most_vertices,
    total_cells,
    zaslavsky,
)
from moegeom.geometry.capacity.hypersimplex import (
    face_count,
    face_counts,
    log10_count,
    num_edges,
    num_facets,
)
from moegeom.studies.cells.exact.collected import collected
from moegeom.studies.cells.exact.exact_cells import exact_cells
from moegeom.studies.cells.walk.level_walk import level_walk

DATA = Path(__file__).resolve().parents[1] / "data"


# -------------------------------------------------------------------------------------- hypersimplex
def faces(k, experts):
    """Faces by dimension, as intersections of the facets that Qhull finds."""
    corners = np.array(list(itertools.combinations(range(experts), k)))
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


@pytest.mark.parametrize(
    ("k", "experts"), [(k, experts) for experts in (3, 4, 5, 6) for k in range(1, experts)]
)
def test_faces_are_those_that_qhull_has(k, experts):
    counts, facets = faces(k, experts)
    assert face_counts(k, experts) == counts
    assert num_facets(k, experts) == facets
    assert num_edges(k, experts) == counts[1]


@pytest.mark.parametrize(("k", "experts"), [(8, 64), (1, 9), (12, 24), (8, 256), (0, 3), (5, 5)])
def test_euler_and_the_corners_hold(k, experts):
    counts = face_counts(k, experts)
    assert sum((-1) ** n * count for n, count in enumerate(counts)) == 1
    assert counts[0] == math.comb(experts, k)
    assert counts[-1] == 1
    assert counts == face_counts(experts - k, experts)
    if 1 < k < experts - 1:
        assert num_facets(k, experts) == 2 * experts


def test_faces_of_no_dimension_and_of_a_point():
    assert [face_count(2, 4, n) for n in (-1, 4, 9)] == [0, 0, 0]
    assert (num_facets(1, 2), num_facets(1, 1), num_edges(3, 3)) == (2, 0, 0)
    with pytest.raises(ValueError, match="top_k 5 of 4"):
        face_count(5, 4, 1)
    np.testing.assert_allclose(log10_count(math.comb(4096, 2048)), 1231.0 + 0.2, 1e-3)
    np.testing.assert_allclose(log10_count(10**400), 400.0, 1e-15)
    assert log10_count(0) == -math.inf


# -------------------------------------------------------------------------------------------- bounds
def test_regions_follow_deletion_and_restriction_and_the_binomial_distribution():
    for m, d in itertools.product(range(1, 12), range(12)):
        assert zaslavsky(m, d) == zaslavsky(m - 1, d) + (zaslavsky(m - 1, d - 1) if d else 0)
    assert zaslavsky(0, 3) == 1
    for m, d in [(256, 16), (512, 100)]:
        wanted = m * math.log(2) + binom.logcdf(d, m, 0.5)
        np.testing.assert_allclose(log_zaslavsky(m, d), wanted, 1e-10)


#: Fixture of the theory notes -> the function of its inputs that gives the expected numbers.
WORKED = {
    "hypersimplex_f": lambda E, k: face_counts(k, E),
    "strata_count": lambda M, k, n: face_count(k, M, n),
    "zaslavsky": lambda pairs: [zaslavsky(m, d) for m, d in pairs],
    "log_zaslavsky": lambda **inputs: log_zaslavsky(inputs["m"], inputs["d"]),
    "cells_total_affine": lambda E, d: total_cells(E, d, is_central=False),
    "cells_total_hom": lambda E, d: total_cells(E, d, is_central=True),
    "cells_ub": lambda cases: [most_cells(*case, is_central=False) for case in cases],
    "granularity_log10": lambda E, k, G: (
        log10_count(math.comb(G * E, G * k)) - log10_count(math.comb(E, k))
    ),
}


@pytest.mark.parametrize("name", WORKED)
def test_the_worked_numbers_of_the_theory_notes_are_met(name):
    listed = json.loads((DATA / "theory_fixtures.json").read_text("utf-8"))["fixtures"]
    fixture = next(item for item in listed if item["name"] == name)
    found = WORKED[name](**fixture["inputs"])
    np.testing.assert_allclose(found, fixture["expected"], fixture["rtol"], fixture["atol"])


@pytest.mark.parametrize("is_central", [False, True])
@pytest.mark.parametrize(("experts", "dims"), [(6, 2), (7, 3), (5, 1), (6, 5), (4, 6), (6, 4)])
def test_bounds_and_totals_hold_for_enumerated_cells(experts, dims, is_central):
    random = np.random.default_rng([experts, dims])
    weight, bias = random.standard_normal((experts, dims)), random.standard_normal(experts)
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
    if dims == 2 and not is_central:  # tangents of a paraboloid: every expert is first somewhere
        bias = -0.5 * (weight**2).sum(axis=1)
        for k in range(1, experts):
            found = len(exact_cells(weight, bias, k).cells)
            assert found <= most_cells_none_hidden(experts, k) <= most_cells(experts, k, 2, False)


def test_bounds_are_attained_on_a_line_and_on_a_circle():
    # of two experts on a line, and of directions of a line
    assert most_cells(2, 1, 1, is_central=False) == 2
    assert [most_cells(6, k, 1, is_central=True) for k in (1, 2, 3)] == [2, 2, 2]
    assert most_cells(64, 8, 0, is_central=False) == most_cells(5, 5, 3, is_central=True) == 1
    # points t, t^2, ... on a curve in four dimensions: every pair of eight wins somewhere
    t = np.arange(8.0)
    moments = np.stack([t, t**2, t**3], axis=1)
    assert len(exact_cells(moments, -(t**4), 2).cells) == most_cells(8, 2, 3, False) == 28
    with pytest.raises(ValueError, match="top_k 0 of 3 experts on 2"):
        most_cells(3, 0, 2, is_central=False)


# ------------------------------------------------------------------------------------------- means
@pytest.mark.parametrize(
    ("experts", "k", "dims", "routers"),
    [(12, 3, 2, 300), (12, 9, 2, 300), (14, 4, 3, 150), (10, 2, 4, 100)],
)
def test_the_mean_diagram_is_that_of_random_routers(experts, k, dims, routers):
    found = []
    for seed in range(routers):
        random = np.random.default_rng([seed, experts])
        mixture = random.standard_normal((dims, dims)) + 2 * np.eye(dims)
        weight = random.standard_normal((experts, dims)) @ mixture + 5.0
        bias = 3.0 * random.standard_normal(experts) + weight.sum(axis=1) - 2.0
        walked = level_walk(weight, bias, k, 10**6)
        assert walked is not None
        cells = collected(walked.on, walked.above, walked.is_simple, walked.rays, weight, bias, k)
        found.append([len(walked.on), len(cells.expert_set), len(cells.facets)])
        assert len(walked.on) <= most_vertices(experts, dims, is_central=False)
    wanted = expected_diagram(experts, k, dims, is_central=False)
    error = np.std(found, axis=0, ddof=1) / math.sqrt(routers)
    distance = np.mean(found, axis=0) - [wanted.vertices, wanted.cells, wanted.facets]
    assert (np.abs(distance) < 4 * error).all()
    assert (error < 0.04 * np.mean(found, axis=0)).all()


@pytest.mark.parametrize(("experts", "k", "dims", "routers"), [(7, 2, 3, 30), (9, 3, 2, 60)])
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
        np.testing.assert_allclose(total, total_cells(experts, dims, is_central), 1e-11)
        vertices = sum(mean.vertices for mean in means)
        orders = dims - is_central  # every vertex has as many orders as its diagram dimensions
        np.testing.assert_allclose(
            vertices, orders * most_vertices(experts, dims, is_central), 1e-11
        )


def test_means_are_counts_where_there_is_no_choice():
    for experts, k in [(5, 2), (8, 1), (8, 5), (12, 6)]:
        for dims in (experts - 1, experts + 3):
            for is_central in (False, True):
                mean = expected_diagram(experts, k, dims, is_central)
                np.testing.assert_allclose(mean.cells, math.comb(experts, k), 1e-11)
                np.testing.assert_allclose(mean.facets, num_edges(k, experts), 1e-11)
    assert expected_diagram(5, 5, 3, False).cells == expected_diagram(5, 2, 0, True).cells == 1.0
    line = expected_diagram(5, 2, 1, is_central=True)
    assert (line.vertices, line.cells, line.facets) == (0.0, 2.0, 1.0)
    plane = expected_diagram(40, 5, 2, is_central=False)  # V - facets + cells = 1
    np.testing.assert_allclose(plane.vertices - plane.facets + plane.cells, 1.0, 0, 1e-9)
    with pytest.raises(ValueError, match="top_k 6 of 5"):
        expected_diagram(5, 6, 1, is_central=False)
