"""Instances in which experts tie: the walk with a few vertices in integers is the exact one."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from moegeom.studies.cells.exact.dictionary import Arrangement, dictionary, inverse_of
from moegeom.studies.cells.exact.exact_cells import ExactCells, exact_cells
from moegeom.studies.cells.walk.enumeration import AllSubsets, Enumeration, enumerate_cells

#: More of them at night.
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 20))]


def _integers(generator, experts, dims):
    rows = generator.integers(-2, 3, (experts, dims)).astype(np.float64)
    return rows, generator.integers(-2, 3, experts).astype(np.float64)


def _duplicates(generator, experts, dims):
    rows, bias = generator.standard_normal((experts, dims)), generator.standard_normal(experts)
    for one, other in generator.choice(experts, (2, 2), replace=False):
        rows[one], bias[one] = rows[other], bias[other]
    return rows, bias


def _equal_rows(generator, experts, dims):
    rows, bias = generator.standard_normal((experts, dims)), generator.standard_normal(experts)
    rows[generator.permutation(experts)[:3]] = rows[0]
    return rows, bias


def _grid(generator, experts, dims):
    rows = generator.integers(0, 3, (experts, dims)).astype(np.float64)
    return rows, -0.5 * (rows**2).sum(axis=1)


def _collinear(generator, experts, dims):
    rows, bias = _integers(generator, experts, dims)
    for m in (2, 3):
        rows[m] = rows[0] + m * (rows[1] - rows[0])
    bias[2] = bias[0] + 2.0 * (bias[1] - bias[0])
    return rows, bias


def _scales(generator, experts, dims):
    rows = generator.integers(-1, 2, (experts, dims)) * np.array([1.0, 1e-3, 7.0])[:dims]
    return rows, np.where(generator.random(experts) < 0.5, 0.0, generator.standard_normal(experts))


INSTANCES = {
    "integers": _integers,
    "duplicates": _duplicates,
    "equal rows": _equal_rows,
    "grid": _grid,
    "collinear": _collinear,
    "scales": _scales,
}


def open_cells(exact: ExactCells, weight, bias) -> set[frozenset[int]]:
    """The cells in which none ties with one that is left out, but for equal experts in order."""
    rows = [[Fraction(value) for value in row] for row in weight.tolist()]
    offsets = [Fraction(value) for value in bias.tolist()]
    found = set()
    for cell, point in exact.cells.items():
        values = [
            sum((w * x for w, x in zip(row, point, strict=True)), offset)
            for row, offset in zip(rows, offsets, strict=True)
        ]
        if all(
            values[i] > values[j] or ((rows[i], offsets[i]) == (rows[j], offsets[j]) and i < j)
            for i, j in itertools.product(cell, set(range(len(rows))) - cell)
        ):
            found.add(cell)
    return found


def assert_is_exact(weight, bias, k, tie_broken) -> Enumeration | None:
    """Cells, facets and ends are those of the exact walk, and witnesses lie in their cells."""
    found = enumerate_cells(weight, bias, k, tie_broken=tie_broken)
    if isinstance(found, AllSubsets):
        return None
    exact = exact_cells(weight, bias, k, tie_broken)
    offsets = np.zeros(len(weight)) if bias is None else bias
    cells = open_cells(exact, weight, offsets)
    rows = [frozenset(row) for row in found.expert_set.tolist()]
    assert rows == sorted(cells, key=sorted)
    facets = {(rows[one], rows[other]) for one, other in found.facets.tolist()}
    assert len(facets) == len(found.facets)
    assert facets == {pair for pair in exact.facets if cells.issuperset(pair)}
    assert found.is_bounded.tolist() == [cell not in exact.unbounded for cell in rows]
    broken = open_cells(exact_cells(weight, bias, k, tie_broken=True), weight, offsets)
    assert [frozenset(row) for row in found.tied.tolist()] == sorted(broken - cells, key=sorted)
    assert exact.tied == broken - cells
    logits = found.witness @ weight.T + offsets
    best = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :k], axis=1)
    np.testing.assert_array_equal(best, found.expert_set)
    return found


@pytest.mark.parametrize("kind", INSTANCES)
@pytest.mark.parametrize("seed", SEEDS)
def test_cells_and_facets_of_instances_with_ties_are_those_of_the_exact_walk(kind, seed):
    generator = np.random.default_rng([seed, *kind.encode()])
    dims = 2 + seed % 2
    experts = int(generator.integers(dims + 3, 9 - dims // 3))
    weight, bias = INSTANCES[kind](generator, experts, dims)
    for k in range(1, experts):
        assert_is_exact(weight, bias, k, tie_broken=(k + seed) % 2 == 0)


@pytest.mark.parametrize("tie_broken", [False, True])
@pytest.mark.parametrize("kind", ["integers", "equal rows", "collinear"])
def test_so_are_those_of_central_routers(kind, tie_broken):
    weight, _ = INSTANCES[kind](np.random.default_rng(len(kind)), 7, 3)
    for k in (2, 3, 5):
        assert_is_exact(weight, None, k, tie_broken)


def test_only_vertices_at_which_further_experts_tie_are_settled_in_integers():
    generator = np.random.default_rng(5)
    weight, bias = generator.standard_normal((14, 2)), generator.standard_normal(14)
    weight[1], bias[1] = weight[0], bias[0]
    found = assert_is_exact(weight, bias, 3, tie_broken=False)
    assert found is not None
    assert found.road == "walk"
    assert 0 < found.num_exact < found.num_vertices


def test_two_pairs_of_equal_experts_are_exchanged_at_one_facet():
    weight = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [-1.0, -2.0]])
    bias = np.array([0.0, 0.0, 0.0, 0.0, 0.5])
    found = enumerate_cells(weight, bias, 2)
    assert isinstance(found, Enumeration)
    assert found.expert_set.tolist() == [[0, 1], [2, 3]]
    assert found.facets.tolist() == [[0, 1]]
    # told apart, the lower number of each pair has a cell with a third expert; {0, 2} has none,
    # as both pairs are on one level on a line only
    broken = enumerate_cells(weight, bias, 2, tie_broken=True)
    assert isinstance(broken, Enumeration)
    assert broken.expert_set.tolist() == [[0, 1], [0, 4], [2, 3], [2, 4]]
    assert broken.facets.tolist() == [[0, 1], [0, 2], [1, 3], [2, 3]]


@pytest.mark.parametrize("kind", INSTANCES)
def test_a_dictionary_in_integers_is_the_one_in_fractions(kind):
    weight, bias = INSTANCES[kind](np.random.default_rng(3), 7, 2)
    rows = [[Fraction(value) for value in row] for row in weight.tolist()]
    offsets = [Fraction(value) for value in bias.tolist()]
    arrangement = Arrangement(rows, offsets)
    lifted = [[*row, Fraction(-1)] for row in rows]
    for on in itertools.combinations(range(7), 3):
        found, inverse = dictionary(arrangement, on), inverse_of([lifted[i] for i in on])
        if found is None or inverse is None:
            assert found is None
            assert inverse is None
            continue
        levels = [-sum((a * offsets[i] for a, i in zip(r, on, strict=True)), 0) for r in inverse]
        assert found.point(arrangement) == tuple(levels[:-1])
        f = [
            sum((a * b for a, b in zip(row, levels, strict=True)), offset)
            for row, offset in zip(lifted, offsets, strict=True)
        ]
        assert found.tied == {j for j in range(7) if f[j] == 0}
        assert {j for j in range(7) if f[j] > 0} <= found.above
        # ties as if the bias of a lower number were larger by more
        nudged = [b + Fraction(1, 10 ** (60 * (1 + j))) for j, b in enumerate(offsets)]
        moved = [-sum((a * nudged[i] for a, i in zip(r, on, strict=True)), 0) for r in inverse]
        pushed = [
            sum((a * b for a, b in zip(row, moved, strict=True)), offset)
            for row, offset in zip(lifted, nudged, strict=True)
        ]
        assert found.above == {j for j in range(7) if j not in on and pushed[j] > 0}
        for column, upwards in itertools.product(range(3), (False, True)):
            assert found.direction(column, upwards) == tuple(
                row[column] if upwards else -row[column] for row in inverse[:-1]
            )
            met = {}
            for j in set(range(7)).difference(on):
                rate = sum(a * row[column] for a, row in zip(lifted[j], inverse, strict=True))
                if rate != 0 and (-pushed[j] / rate > 0) == upwards:
                    met[j] = abs(pushed[j] / rate)
            assert found.shot(column, upwards) == min(met, key=met.__getitem__, default=None)
