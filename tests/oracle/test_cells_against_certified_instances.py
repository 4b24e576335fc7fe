"""Cells against the instances whose every answer carries an exact certificate."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moegeom.studies.cells.exact.exact_cells import exact_cells, expert_sets

TRUTH = Path(__file__).resolve().parents[1] / "data/cells_truth.json"
SHA256 = "43c9ae4e2a1203961ddc3d256065c87343c9d4437f28d15e8fe075fbfbb92749"
INSTANCES: list[dict[str, Any]] = json.loads(TRUTH.read_text("utf-8"))["instances"]

#: Instances that the exact reference walks within seconds, and those for the night.
WHOLE = [i for i in INSTANCES if i["ball_radius"] is None and i["n_cells"] <= 500]
SMALL = [i for i in WHOLE if i["E"] <= 16]
LARGE = [i for i in WHOLE if i["E"] > 16]


def arrays(instance: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """W and b by the convention of the file; b is None for a central router."""
    generator = np.random.default_rng(instance["seed"])
    experts = instance["E"]
    weight = generator.standard_normal((experts, instance["d"]))
    bias = generator.standard_normal(experts) if instance["affine"] else np.zeros(experts)
    for name, *rest in instance["mods"]:
        weight, bias = MODS[name](weight, bias, *rest)
    return weight, bias if instance["affine"] or bias.any() else None


def _dup(weight, bias, i, j):
    weight[j], bias[j] = weight[i], bias[i]
    return weight, bias


def _duprow(weight, bias, i, j):
    weight[j] = weight[i]
    return weight, bias


def _zero(weight, bias, i):
    weight[i] = 0
    return weight, bias


def _collinear(weight, bias, rows):
    for m, row in enumerate(rows[2:], 2):
        weight[row] = weight[rows[0]] + m * (weight[rows[1]] - weight[rows[0]])
    return weight, bias


def _collinear_b(weight, bias, rows):
    weight, bias = _collinear(weight, bias, rows)
    for m, row in enumerate(rows[2:], 2):
        bias[row] = bias[rows[0]] + m * (bias[rows[1]] - bias[rows[0]])
    return weight, bias


def _int(weight, bias, q):
    return np.rint(q * weight), np.rint(q * bias)


def _voronoi(weight, bias):
    return weight, -0.5 * (weight * weight).sum(1)


def _neardup(weight, bias, i, j, e):
    weight[j], bias[j] = weight[i] * (1.0 + e), bias[i] * (1.0 - e)
    return weight, bias


def _grid(weight, bias, n):
    axes = np.indices((n,) * weight.shape[1]).reshape(weight.shape[1], -1)
    weight = axes.T.astype(np.float64)
    return weight, -(weight * weight).sum(1) / 2


MODS = {
    "dup": _dup,
    "duprow": _duprow,
    "zero": _zero,
    "collinear": _collinear,
    "collinear_b": _collinear_b,
    "int": _int,
    "voronoi": _voronoi,
    "neardup": _neardup,
    "grid": _grid,
}


def digest(cells: list[tuple[int, ...]]) -> str:
    """SHA-1 over the sorted cells, as the file has it."""
    return hashlib.sha1(";".join(",".join(map(str, cell)) for cell in cells).encode()).hexdigest()


def test_the_instances_are_the_certified_ones():
    assert hashlib.sha256(TRUTH.read_bytes()).hexdigest() == SHA256


@pytest.mark.parametrize(
    "instance",
    [*SMALL, *(pytest.param(instance, marks=pytest.mark.nightly) for instance in LARGE)],
    ids=lambda instance: instance["name"],
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


@pytest.mark.parametrize(("experts", "d", "seed"), [(7, 2, 1), (8, 3, 2), (6, 1, 3)])
def test_cells_of_all_orders_sum_to_the_faces_of_the_arrangement(experts, d, seed):
    generator = np.random.default_rng(seed)
    weight, bias = generator.standard_normal((experts, d)), generator.standard_normal(experts)
    # order 0 is the one cell of no experts
    total = 1 + sum(len(exact_cells(weight, bias, k).cells) for k in range(1, experts + 1))
    assert total == sum(math.comb(experts, i) for i in range(d + 2))
    central = 2 * sum(math.comb(experts - 1, i) for i in range(d + 1))
    counted = [len(exact_cells(weight, None, k).cells) for k in range(1, experts + 1)]
    assert 1 + sum(counted) == central


def test_equal_experts_are_told_apart_on_request():
    weight, bias = np.array([[1.0], [1.0], [-1.0]]), np.zeros(3)
    assert expert_sets(exact_cells(weight, bias, 1)) == [(2,)]
    assert expert_sets(exact_cells(weight, bias, 1, tie_broken=True)) == [(0,), (2,)]


@pytest.mark.parametrize("k", [1, 3, 6])
def test_every_point_lies_in_a_cell_and_every_cell_holds_its_point(k):
    generator = np.random.default_rng(k)
    weight, bias = generator.standard_normal((7, 3)), generator.standard_normal(7)
    found = exact_cells(weight, bias, k)
    for expert_set, point in found.cells.items():
        logits = weight @ np.array([float(x) for x in point]) + bias
        assert set(np.argsort(-logits)[:k]) == expert_set
    for x in generator.standard_normal((2000, 3)) * 4.0:
        assert frozenset(np.argsort(-(weight @ x + bias))[:k].tolist()) in found.cells


def test_central_cells_are_those_of_all_directions():
    weight = np.random.default_rng(8).standard_normal((8, 3))
    found = exact_cells(weight, None, 2)
    directions = np.random.default_rng(9).standard_normal((20_000, 3))
    seen = {
        tuple(sorted(row)) for row in np.argsort(-(directions @ weight.T), axis=1)[:, :2].tolist()
    }
    assert seen <= set(expert_sets(found))  # directions miss thin cells
    for expert_set, point in found.cells.items():
        logits = weight @ np.array([float(x) for x in point])
        assert set(np.argsort(-logits)[:2]) == expert_set
    assert found.unbounded == set(found.cells)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_columns_that_depend_on_others_change_no_cell(columns):
    generator = np.random.default_rng(columns)
    inner, bias = generator.integers(-9, 9, (7, columns)).astype(float), generator.normal(size=7)
    mixed = inner @ generator.integers(-3, 3, (columns, 5)).astype(float)
    mixed[:, :columns] = inner
    assert expert_sets(exact_cells(mixed, bias, 3)) == expert_sets(exact_cells(inner, bias, 3))


def test_complements_swap_the_signs():
    generator = np.random.default_rng(4)
    weight, bias = generator.standard_normal((6, 2)), generator.standard_normal(6)
    most = expert_sets(exact_cells(weight, bias, 4))
    least = expert_sets(exact_cells(-weight, -bias, 2))
    assert most == sorted(tuple(sorted(set(range(6)) - set(cell))) for cell in least)
    with pytest.raises(ValueError, match="7 of 6"):
        exact_cells(weight, bias, 7)
