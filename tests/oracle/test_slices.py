"""Slices, circles and polygons against other code and against dense points."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog
from sklearn.decomposition import PCA

from moegeom.studies.cells.ball.inradius import inradii
from moegeom.studies.cells.exact.exact_cells import exact_cells, expert_sets
from moegeom.studies.cells.plane.circle import circle_arcs
from moegeom.studies.cells.plane.polygons import polygons
from moegeom.studies.cells.plane.subspace import principal_slice, random_slice, slice_through
from moegeom.studies.cells.walk.enumeration import Enumeration, enumerate_cells


@pytest.mark.parametrize("tokens", [20, 200])
def test_principal_directions_are_those_of_scikit_learn(tokens):
    generator = np.random.default_rng(tokens)
    inputs = generator.standard_normal((tokens, 40)) * np.linspace(3.0, 0.1, 40) + 1.0
    found, share = principal_slice(inputs, 3)
    oracle = PCA(n_components=3).fit(inputs)
    np.testing.assert_allclose(np.abs(np.diag(found.basis.T @ oracle.components_.T)), 1.0)
    np.testing.assert_allclose(share, oracle.explained_variance_ratio_.sum())
    np.testing.assert_allclose(found.centre, oracle.mean_)
    np.testing.assert_allclose(found.basis.T @ found.basis, np.eye(3), atol=1e-12)


def test_logits_of_a_slice_are_those_of_its_points():
    generator = np.random.default_rng(1)
    weight, bias = generator.standard_normal((9, 30)), generator.standard_normal(9)
    part = random_slice(generator.standard_normal(30), 3, seed=5)
    rows, offset = part.instance(weight, bias)
    points = generator.standard_normal((50, 3))
    np.testing.assert_allclose(points @ rows.T + offset, part.inputs(points) @ weight.T + bias)
    np.testing.assert_allclose(part.coordinates(part.inputs(points)), points)


@pytest.mark.parametrize("experts", [17, 21, 37])
def test_equal_rows_are_equal_on_a_slice(experts):
    generator = np.random.default_rng(experts)
    for dims in (1, 2, 3):
        weight = generator.standard_normal((experts, 64)).astype(np.float32)
        weight[-1], weight[experts // 2] = weight[0], weight[3]
        part = random_slice(generator.standard_normal(64), dims, 0)
        found = np.column_stack(part.instance(weight, None))
        np.testing.assert_array_equal(found[[-1, experts // 2]], found[[0, 3]])
        assert len(np.unique(found, axis=0)) == experts - 2


def test_a_plane_goes_through_its_three_points():
    generator = np.random.default_rng(2)
    points = generator.standard_normal((3, 20))
    part = slice_through(points)
    np.testing.assert_allclose(part.inputs(part.coordinates(points)), points)


def test_points_on_a_line_span_no_plane():
    line = np.outer([0.0, 1.0, 2.0], np.ones(5))
    with pytest.raises(ValueError, match="span fewer"):
        slice_through(line)


def test_more_directions_than_the_inputs_span_are_refused():
    with pytest.raises(ValueError, match="3 directions of 3 inputs"):
        principal_slice(np.eye(3), 3)
    with pytest.raises(ValueError, match="4 directions"):
        random_slice(np.zeros(3), 4, 0)


@pytest.mark.parametrize("has_bias", [False, True])
def test_arcs_hold_the_choice_of_every_angle(has_bias):
    generator = np.random.default_rng(3)
    cosine, sine = generator.standard_normal((2, 16))
    bias = generator.standard_normal(16) if has_bias else np.zeros(16)
    arcs = circle_arcs(cosine, sine, bias, 4)
    assert arcs.is_proved.all()
    angles = np.linspace(0.0, 2.0 * np.pi, 20_001)[:-1]
    logits = np.outer(np.cos(angles), cosine) + np.outer(np.sin(angles), sine) + bias
    chosen = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :4], axis=1)
    arc = np.searchsorted(arcs.start, angles, side="right") - 1
    np.testing.assert_array_equal(arcs.expert_set[arc], chosen)
    assert np.all(np.diff(arcs.start) > 0.0)
    assert arcs.stop[-1] == arcs.start[0] + 2.0 * np.pi
    if not has_bias:
        exact = exact_cells(np.column_stack([cosine, sine]), None, 4)
        assert sorted(map(tuple, arcs.expert_set.tolist())) == expert_sets(exact)


def test_a_circle_on_which_nothing_changes_is_one_arc():
    bias = np.array([0.0, 5.0, 0.1])
    arcs = circle_arcs(np.array([0.1, 0.2, 0.1]), np.zeros(3), bias, 1)
    assert arcs.expert_set.tolist() == [[1]]
    same = circle_arcs(np.ones(3), np.ones(3), np.zeros(3), 3)
    assert same.expert_set.tolist() == [[0, 1, 2]]


def test_polygons_hold_the_points_that_choose_their_expert_set():
    generator = np.random.default_rng(4)
    weight, bias = generator.standard_normal((12, 2)), generator.standard_normal(12)
    found = enumerate_cells(weight, bias, 3)
    assert isinstance(found, Enumeration)
    frame = (-2.0, 3.0, -2.5, 1.5)
    drawn = polygons(weight, bias, found.expert_set, found.facets, frame)
    assert np.isclose(sum(map(_area, drawn.corners)), 5.0 * 4.0)
    points = generator.uniform((-2.0, -2.5), (3.0, 1.5), (3000, 2))
    logits = points @ weight.T + bias
    chosen = np.sort(np.argsort(-logits, axis=1)[:, :3], axis=1)
    cells = {tuple(row): n for n, row in enumerate(found.expert_set.tolist())}
    for point, expert_set in zip(points, chosen.tolist(), strict=True):
        assert _is_inside(drawn.corners[cells[tuple(expert_set)]], point)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_polygons_and_balls_end_where_equal_experts_leave_no_cell(k):
    """Every point of the frame is inside the polygon of what it chooses, or of none at a tie."""
    generator = np.random.default_rng(k)
    weight, bias = generator.standard_normal((9, 2)), generator.standard_normal(9)
    weight[[4, 6, 8]], bias[[4, 6, 8]] = weight[[1, 2, 2]], bias[[1, 2, 2]]
    equal = [np.array([1, 4]), np.array([2, 6, 8])]
    found = enumerate_cells(weight, bias, k)
    assert isinstance(found, Enumeration)
    drawn = polygons(weight, bias, found.expert_set, found.facets, (-2.0, 2.0, -2.0, 2.0), equal)
    points = generator.uniform(-2.0, 2.0, (2000, 2))
    logits = np.sort(points @ weight.T + bias, axis=1)[:, ::-1]
    is_tied = logits[:, k - 1] - logits[:, k] < 1e-12
    assert 20 < is_tied.sum() < 2000
    chosen = np.sort(np.argsort(-(points @ weight.T + bias), axis=1)[:, :k], axis=1).tolist()
    cells = {tuple(row): n for n, row in enumerate(found.expert_set.tolist())}
    drawn_in = [
        {
            n
            for n, corners in enumerate(drawn.corners)
            if len(corners) and _is_inside(corners, point)
        }
        for point in points
    ]
    expected = [set() if tie else {cells[tuple(c)]} for tie, c in zip(is_tied, chosen, strict=True)]
    assert drawn_in == expected
    radii = inradii(weight, bias, found.expert_set, found.facets, equal)
    for expert_set, radius in zip(found.expert_set.tolist(), radii, strict=True):
        outside = [j for j in range(9) if j not in expert_set]
        pairs = [(i, j) for i in expert_set for j in outside]
        assert radius == pytest.approx(_largest_ball(weight, bias, pairs), rel=1e-5)


def _largest_ball(weight, bias, pairs):
    """By one program over all pairs of experts; inf where it has no end."""
    rows = np.array([weight[i] - weight[j] for i, j in pairs])
    offsets = np.array([bias[i] - bias[j] for i, j in pairs])
    table = np.column_stack([-rows, np.linalg.norm(rows, axis=1)])
    solved = linprog([0.0, 0.0, -1.0], table, offsets, bounds=[(None, None)] * 3)
    return np.inf if solved.status == 3 else -solved.fun


def test_ends_of_a_facet_tie_its_two_experts_and_lie_in_the_frame():
    generator = np.random.default_rng(5)
    weight, bias = generator.standard_normal((12, 2)), generator.standard_normal(12)
    found = enumerate_cells(weight, bias, 3)
    assert isinstance(found, Enumeration)
    drawn = polygons(weight, bias, found.expert_set, found.facets, (-1.0, 1.0, -1.0, 1.0))
    inside = ~np.isnan(drawn.facet_ends[:, 0, 0])
    assert 0 < inside.sum() < len(found.facets)
    for ends, (one, other) in zip(
        drawn.facet_ends[inside], found.facets[inside].tolist(), strict=True
    ):
        (out,) = set(found.expert_set[one].tolist()) - set(found.expert_set[other].tolist())
        (into,) = set(found.expert_set[other].tolist()) - set(found.expert_set[one].tolist())
        gap = ends @ (weight[out] - weight[into]) + bias[out] - bias[into]
        np.testing.assert_allclose(gap, 0.0, atol=1e-12)
        assert (np.abs(ends) <= 1.0 + 1e-12).all()


def _area(corners):
    if not len(corners):
        return 0.0
    x, y = corners.T
    return 0.5 * float(x @ np.roll(y, -1) - y @ np.roll(x, -1))


def _is_inside(corners, point):
    edge, to_point = np.roll(corners, -1, axis=0) - corners, point - corners
    return (edge[:, 0] * to_point[:, 1] - edge[:, 1] * to_point[:, 0] >= -1e-12).all()
