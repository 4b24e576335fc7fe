"""Cells of cones, where all experts tie at one point, against programs over all sets and fractions."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from moegeom.routing_cells.exact.dictionary import common_tie
from moegeom.routing_cells.walk.enumeration import AllSubsets, enumerate_cells
from tests.by_day import by_day
from tests.oracle import helpers
from tests.oracle.exact_cells import exact_cells, expert_sets
from tests.oracle.helpers import ahead, choices, named


def coarse_rows(experts: int, d: int, seed: int = 0) -> np.ndarray:
    """Rows of so few bits that products with coarse points are exact."""
    return np.round(1024.0 * np.random.default_rng(seed).standard_normal((experts, d))) / 1024.0


def is_open(strict: np.ndarray, level: np.ndarray | None = None) -> bool:
    """Whether some x has strict @ x > 0, and level @ x = 0: a linear program."""
    tie = None if level is None else (level, 0.0)
    bounds = [(-1.0, 1.0)] * strict.shape[1]
    return helpers.largest_margin(strict, np.zeros(len(strict)), tie, bounds) > 1e-7


def cones(weight: np.ndarray, k: int) -> tuple[set, set]:
    """The cells of W x by their definition, one program a set, and the facets, one a pair."""
    everyone, level = range(len(weight)), np.zeros(len(weight))
    cells = {
        some
        for some in combinations(everyone, k)
        if is_open(ahead(weight, level, some, [j for j in everyone if j not in some])[0])
    }
    facets = set()
    for one, other in combinations(sorted(cells), 2):
        both = [i for i in one if i in other]
        if len(both) == k - 1:
            (out,), (into,) = set(one) - set(other), set(other) - set(one)
            neither = [j for j in everyone if j not in (*both, out, into)]
            above = ahead(weight, level, both, [out])[0]
            strict = np.concatenate([above, ahead(weight, level, [out], neither)[0]])
            if is_open(strict, weight[out] - weight[into]):
                facets.add((one, other))
    return cells, facets


TIPS = [(8, 1, 2), (9, 3, 3), (8, 6, 3), (9, 4, 4)]


@pytest.mark.parametrize(("experts", "k", "d"), by_day(TIPS, [(8, 1, 2), (8, 6, 3)]))
def test_cells_around_the_tip_are_those_of_a_program_for_each_set(experts, k, d):
    weight = np.random.default_rng(experts).standard_normal((experts, d))
    expected = cones(weight, k)
    for bias in (None, np.full(experts, 0.3)):
        found = enumerate_cells(weight, bias, k)
        assert named(found) == expected
        assert_array_equal(choices(found.witness, weight, bias, k), found.expert_set)


@pytest.mark.parametrize("k", [2, 6])
def test_a_tip_anywhere_has_the_cells_of_one_at_the_origin(k):
    weight, tip = coarse_rows(8, 3), np.array([0.5, -0.25, 0.5])
    bias = 2.0 - weight @ tip
    whole = enumerate_cells(weight, bias, k)
    assert named(whole) == cones(weight, k)
    assert_array_equal(choices(whole.witness, weight, bias, k), whole.expert_set)


@pytest.mark.parametrize("tie_broken", [False, True])
def test_equal_experts_that_tie_with_all_others_are_those_of_the_exact_walk(tie_broken):
    weight, tip = coarse_rows(8, 3, seed=5), np.array([1.0, 0.5, -0.25])
    weight[6] = weight[1]
    bias = -weight @ tip
    exact = exact_cells(weight, bias, 3, tie_broken)
    found = enumerate_cells(weight, bias, 3, tie_broken=tie_broken)
    facets = {tuple(sorted(tuple(sorted(c)) for c in pair)) for pair in exact.facets}
    assert named(found) == (set(expert_sets(exact)), facets)


def test_experts_tie_at_a_point_when_fractions_say_so_and_every_set_may_be_a_cell():
    weight, tip = coarse_rows(12, 4), np.array([0.5, -3.0, 0.0, 0.125])
    bias = 7.0 - weight @ tip
    assert common_tie(weight, bias) == tuple(map(Fraction, tip.tolist()))
    assert common_tie(weight, np.full(12, 0.1)) == (0, 0, 0, 0)
    for expert in range(12):
        moved = bias.copy()
        moved[expert] = np.nextafter(moved[expert], np.inf)
        assert common_tie(weight, moved) is None
    # what is 0 modulo the prime is not 0
    moved = bias.copy()
    moved[11] += 2.0**31 - 1.0
    assert common_tie(weight, moved) is None
    # three experts in a plane always tie somewhere, at a point that float64 need not hold
    weight, bias = np.array([[1.0, 0.0], [0.0, 3.0], [7.0, 1.0]]), np.array([0.1, 0.2, 0.3])
    point = common_tie(weight, bias)
    assert len(set(helpers.exact_logits(weight, bias, point))) == 1
    # parallel lines tie nowhere, and on a line of points none is told from the others
    assert common_tie(np.array([[1.0], [1.0]]), np.array([0.0, 1.0])) is None
    assert common_tie(np.array([[1.0, 0.0], [3.0, 0.0]]), np.array([0.0, 1.0])) is None
    weight = np.random.default_rng(1).standard_normal((6, 5))
    found = enumerate_cells(weight, None, 3)
    assert isinstance(found, AllSubsets)
    assert found.num_cells == len(cones(weight, 3)[0]) == 20
