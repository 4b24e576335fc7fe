"""Regions on segments and in polygons, against signs at many points and by counting faces."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import linprog

from moegeom.geometry import region_counts as regions
from moegeom.geometry.capacity import zaslavsky

SQUARE = [(Fraction(x), Fraction(y)) for x, y in ((-1, -1), (1, -1), (1, 1), (-1, 1))]


def by_linear_programs(lines: np.ndarray) -> int:
    """Sign patterns that some open set of the square has: one linear program each."""
    number = 0
    for signs in itertools.product((-1.0, 1.0), repeat=len(lines)):
        s = np.array(signs)[:, None]
        rows = np.column_stack([-s * lines[:, :2], np.linalg.norm(lines[:, :2], axis=1)])
        done = linprog([0, 0, -1], A_ub=rows, b_ub=(s * lines[:, 2:]).ravel(),
                       bounds=[(-1, 1), (-1, 1), (0, 1)])  # fmt: skip
        number += done.status == 0 and -done.fun > 1e-9
    return number


@pytest.mark.parametrize("seed", range(3))
def test_regions_are_the_sign_patterns_of_linear_programs_and_of_a_fine_grid(seed: int) -> None:
    lines = np.random.default_rng(seed).normal(size=(6, 3)) * [1.0, 1.0, 0.4]
    assert regions.regions_in_polygon(SQUARE, lines) == by_linear_programs(lines)
    lines = np.random.default_rng(seed).normal(size=(9, 3)) * [1.0, 1.0, 0.5]
    axis = np.linspace(-1.0, 1.0, 801)[1:-1]
    x, y = np.meshgrid(axis, axis)
    signs = np.column_stack([x.ravel(), y.ravel(), np.ones(x.size)]) @ lines.T > 0.0
    seen = len(np.unique(signs @ 2 ** np.arange(9)))
    assert seen <= regions.regions_in_polygon(SQUARE, lines) <= seen + 3


def test_general_positions_have_the_most_regions_and_parts_add_up_by_euler():
    draw = np.random.default_rng(0)
    lines = np.column_stack([draw.normal(size=(30, 2)), 1e-3 * draw.normal(size=30)])
    large = [(1000 * x, 1000 * y) for x, y in SQUARE]
    assert regions.regions_in_polygon(large, lines) == zaslavsky(30, 2)
    grid = [[1, 0, c] for c in (-0.5, 0, 0.5)] + [[0, 1, c] for c in (-0.5, 0.5)]
    angles = [[1, 0, 0], [0, 1, 0], [1, 1, 0], [1, -1, 0], [1, 3, 0]]
    for lines, expected in (
        (grid, 12),
        ([*grid, [-2, 0, 1], [0, 0, 1]], 12),
        (angles, 10),
        # through (0.3, 0.1), which float64 does not hold: three bits decide
        ([[1, 0, -0.3], [0, 1, -0.1], [1, 1, -0.4]], 7),
        ([[1, 0, -0.25], [0, 1, -0.5], [1, 1, -0.75]], 6),
        ([[1.0, 1.0, 2.0], [1.0, 0.0, 3.0]], 1),
    ):
        assert regions.regions_in_polygon(SQUARE, np.array(lines, float)) == expected
    # cut along one line, the regions that it crosses count twice
    lines = np.random.default_rng(3).normal(size=(12, 3)) * [1.0, 1.0, 0.4]
    cut = np.array([[0.3, 1.0, 0.1]])
    a, b, c = map(Fraction, cut[0].tolist())
    sides = [regions.clipped(SQUARE, [(s * a, s * b, s * c)]) for s in (1, -1)]
    both = sum(regions.regions_in_polygon(side, lines) for side in sides)
    assert both == regions.regions_in_polygon(SQUARE, np.concatenate([lines, cut]))
    assert regions.clipped(SQUARE, [(Fraction(1), Fraction(0), Fraction(-1))]) == []


def test_roots_on_segments_are_where_signs_change_in_pieces_of_the_expert():
    draw = np.random.default_rng(1)
    start, stop = draw.normal(size=(2, 5, 7))
    first = np.array([0, 2, 2, 3, 5, 5])
    at = np.array([0.2, 0.6, 0.5, 0.1, 0.9])
    chosen = draw.random(len(at) + 5) < 0.5
    roots = regions.segment_roots(start, stop, first, at, chosen)
    t = np.linspace(0.0, 1.0, 200_001)
    for s in range(5):
        values = start[s] + t[:, None] * (stop - start)[s]
        changed, _ = np.nonzero(np.diff(values > 0.0, axis=0))
        own = roots.segment == s
        assert_allclose(np.sort(roots.at[own]), np.sort(t[changed]), atol=1e-5)
        pieces = chosen[first[s] + s : first[s + 1] + s + 1]
        inside = pieces[np.searchsorted(at[first[s] : first[s + 1]], roots.at[own])]
        assert_array_equal(roots.is_active[own], inside)
    start, stop = np.array([[1.0, 1.0, 0.0, 2.0]]), np.array([[-1.0, -1.0, -1.0, 1.0]])
    roots = regions.segment_roots(start, stop, np.array([0, 0]), np.empty(0), np.array([True]))
    assert roots.at.tolist() == [0.5, 0.5]
    assert regions.distinct_places(roots.segment, roots.at, 1).tolist() == [1]
