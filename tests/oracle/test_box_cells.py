"""Cells and facets of a box against all subsets in HiGHS, and what is above what in fractions."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as some_array
from scipy.optimize import linprog

from moegeom.studies.cells.ball.box import (
    experts_that_matter,
    filter_box,
    surely_above,
    surely_above_in_ball,
)
from moegeom.studies.cells.exact.certificate_check import CellPoint, FacetPoint, check_certificate


def largest_margin(weight, bias, chosen, others, tied, lower, upper):
    """The oracle: one constraint for each pair, in x alone, with the closed box as bounds."""
    pairs = list(product(chosen, others))
    ahead = np.array([[*(weight[j] - weight[i]), 1.0] for i, j in pairs])
    free = np.array([bias[i] - bias[j] for i, j in pairs])
    solved = linprog(
        np.append(np.zeros(len(lower)), -1.0),
        ahead,
        free,
        None if tied is None else np.append(weight[tied[0]] - weight[tied[1]], 0.0)[None],
        None if tied is None else [bias[tied[1]] - bias[tied[0]]],
        bounds=[*zip(lower, upper, strict=True), (None, 1.0)],
    )
    return -solved.fun if solved.status == 0 else -1.0  # the pair ties nowhere in the box


@pytest.mark.parametrize(
    ("experts", "d", "k", "half", "is_witnessed"), [(9, 2, 3, 0.7, True), (8, 3, 2, 0.5, False)]
)
def test_cells_and_facets_of_a_box_are_those_of_all_subsets(experts, d, k, half, is_witnessed):
    generator = np.random.default_rng(experts)
    weight, bias = generator.standard_normal((experts, d)), generator.standard_normal(experts)
    lower, upper = np.full(d, -half), np.full(d, half) * np.linspace(1.0, 1.5, d)
    subsets = np.array(list(combinations(range(experts), k)), np.int16)
    number = {tuple(row): i for i, row in enumerate(subsets.tolist())}
    facets, out, into = [], [], []
    for row in subsets[:: 5 if d == 3 else 9].tolist():
        for leaves, enters in product(row, sorted(set(range(experts)) - set(row))):
            facets.append([number[tuple(row)], number[tuple(sorted({*row, enters} - {leaves}))]])
            out.append(leaves)
            into.append(enters)
    witness = np.zeros((len(subsets), d)) if is_witnessed else None
    found = filter_box(
        weight,
        bias,
        subsets,
        np.array(facets),
        np.array(out, np.int16),
        np.array(into, np.int16),
        lower,
        upper,
        witness,
    )
    for row, proof in zip(subsets.tolist(), found.cells, strict=True):
        check_certificate(weight, bias, row, proof, lower=lower, upper=upper)
        others = sorted(set(range(experts)) - set(row))
        margin = largest_margin(weight, bias, row, others, None, lower, upper)
        assert abs(margin) > 1e-7  # no close call among these seeds
        assert isinstance(proof, CellPoint) == (margin > 0)
    for (first, _), leaves, enters, proof in zip(facets, out, into, found.facets, strict=True):
        row = subsets[first].tolist()
        check_certificate(weight, bias, row, proof, swap=(leaves, enters), lower=lower, upper=upper)
        # all chosen above the pair, and the pair above all others
        kept = [i for i in row if i != leaves]
        others = [j for j in range(experts) if j not in row and j != enters]
        margin = min(
            largest_margin(weight, bias, side, rest, (leaves, enters), lower, upper)
            for side, rest in [([*kept, leaves], others), (kept, [*others, leaves])]
        )
        if margin > 0:  # both at one point, not only each at its own
            margin = facet_margin(weight, bias, kept, others, leaves, enters, lower, upper)
        assert abs(margin) > 1e-7
        assert isinstance(proof, FacetPoint) == (margin > 0)
    assert 0 < found.has_cell.sum() < len(subsets)
    assert 0 < found.has_facet.sum() < len(facets)


def facet_margin(weight, bias, kept, others, out, into, lower, upper):
    """Everyone against one of the pair, which tie."""
    rows = [(i, out) for i in kept] + [(out, j) for j in others]
    ahead = np.array([[*(weight[j] - weight[i]), 1.0] for i, j in rows])
    free = np.array([bias[i] - bias[j] for i, j in rows])
    tie = np.append(weight[out] - weight[into], 0.0)[None]
    bounds = [*zip(lower, upper, strict=True), (None, 1.0)]
    cost = np.append(np.zeros(len(lower)), -1.0)
    return -linprog(cost, ahead, free, tie, [bias[into] - bias[out]], bounds=bounds).fun


def test_a_box_with_open_ends_and_a_central_router():
    weight = np.random.default_rng(3).standard_normal((6, 2))
    subsets = np.array(list(combinations(range(6), 2)))
    none = np.empty(0, np.int64)
    lower, upper = np.array([0.5, -np.inf]), np.array([np.inf, np.inf])
    found = filter_box(weight, None, subsets, np.empty((0, 2), np.int64), none, none, lower, upper)
    for row, proof in zip(subsets.tolist(), found.cells, strict=True):
        check_certificate(weight, None, row, proof, lower=lower, upper=upper)
    # cells are cones: those met on the right are met by a sample of directions on the right
    angles = np.linspace(-np.pi / 2, np.pi / 2, 20_001)[1:-1]
    logits = np.stack([np.cos(angles), np.sin(angles)], axis=1) @ weight.T
    seen = {tuple(sorted(row)) for row in np.argsort(-logits, axis=1)[:, :2].tolist()}
    assert seen == {tuple(row) for row in subsets[found.has_cell].tolist()}


numbers = (
    st.floats(-3, 3) | st.integers(-2, 2).map(float) | st.sampled_from([1e-200, -1e200, 5e-324])
)


@given(
    some_array(np.float64, (4, 2), elements=numbers),
    some_array(np.float64, 4, elements=numbers),
    some_array(np.float64, 2, elements=st.floats(-2, 2)),
    some_array(np.float64, 2, elements=st.floats(0.01, 2)),
)
def test_what_is_surely_above_is_so_at_every_corner(weight, bias, lower, width):
    upper = lower + width
    above = surely_above(weight, bias, lower, upper)
    corners = [[Fraction(x) for x in corner] for corner in product(*zip(lower, upper, strict=True))]
    for i, j in np.argwhere(above).tolist():
        for corner in corners:
            terms = [
                (Fraction(a) - Fraction(b)) * x
                for a, b, x in zip(weight[i], weight[j], corner, strict=True)
            ]
            assert sum(terms) + Fraction(bias[i]) - Fraction(bias[j]) > 0


@given(
    some_array(np.float64, (4, 2), elements=numbers),
    some_array(np.float64, 4, elements=numbers),
    some_array(np.float64, 2, elements=st.floats(-2, 2)),
    st.floats(0, 2),
)
def test_what_is_surely_above_in_a_ball_is_so_at_its_lowest_point(weight, bias, centre, radius):
    above = surely_above_in_ball(weight, bias, centre, radius)
    for i, j in np.argwhere(above).tolist():
        ahead = [Fraction(a) - Fraction(b) for a, b in zip(weight[i], weight[j], strict=True)]
        middle = sum(a * Fraction(c) for a, c in zip(ahead, centre, strict=True))
        middle += Fraction(bias[i]) - Fraction(bias[j])
        assert middle > 0
        assert middle**2 > Fraction(radius) ** 2 * sum(a * a for a in ahead)


def test_nearly_all_that_is_above_is_seen():
    generator = np.random.default_rng(2)
    weight, bias = generator.standard_normal((40, 3)), generator.standard_normal(40)
    lower, upper = np.full(3, -0.2), np.full(3, 0.2)
    corners = np.array(list(product(*zip(lower, upper, strict=True))))
    gaps = ((weight[:, None] - weight) @ corners.T).min(axis=2) + bias[:, None] - bias
    assert (np.abs(gaps[~np.eye(40, dtype=bool)]) > 1e-12).all()
    np.testing.assert_array_equal(surely_above(weight, bias, lower, upper), gaps > 0)
    length = np.linalg.norm(weight[:, None] - weight, axis=2)
    gaps = bias[:, None] - bias + (weight[:, None] - weight) @ lower - 0.3 * length
    np.testing.assert_array_equal(surely_above_in_ball(weight, bias, lower, 0.3), gaps > 0)


def test_open_ends_leave_only_what_points_the_right_way():
    weight, bias = np.array([[1.0, 2.0], [0.0, 2.0], [1.0, 1.0]]), np.array([0.0, -1.0, -5.0])
    above = surely_above(weight, bias, np.array([0.0, 3.0]), np.array([np.inf, np.inf]))
    np.testing.assert_array_equal(above, [[False, True, True], [False, False, False], [False] * 3])


@pytest.mark.parametrize("k", [1, 4, 11, 12])
def test_the_rest_decides_the_top_k_in_the_whole_box(k):
    generator = np.random.default_rng(6)
    weight, bias = generator.standard_normal((12, 2)), 2.0 * generator.standard_normal(12)
    lower, upper = np.full(2, -0.4), np.full(2, 0.6)
    above = surely_above(weight, bias, lower, upper)
    fixed, dropped, rest = experts_that_matter(above, k)
    assert sorted([*fixed, *dropped, *rest]) == list(range(12))
    assert len(rest) < 12
    points = generator.uniform(lower, upper, (500, 2))
    logits = points @ weight.T + bias
    for row in logits:
        inner = rest[np.argsort(-row[rest])[: k - len(fixed)]]
        assert {*fixed.tolist(), *inner.tolist()} == set(np.argsort(-row)[:k].tolist())


def test_an_empty_box_is_refused():
    none = np.empty(0, np.int64)
    with pytest.raises(ValueError, match="not below"):
        filter_box(
            np.eye(2),
            None,
            np.array([[0]]),
            np.empty((0, 2), np.int64),
            none,
            none,
            np.ones(2),
            np.ones(2),
        )
