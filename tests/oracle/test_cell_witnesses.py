"""Oracle: logits in fractions. Every cell that is listed has a point that chooses it, or a proof."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pyarrow.parquet as pq
import pytest

import moegeom as mg
from moegeom.core.errors import UsageError
from moegeom.studies.cells.ball.inradius import inradii
from moegeom.studies.cells.exact.certificate_check import CellPoint, from_json
from moegeom.studies.cells.exact.witness import check_witness, strict_witnesses
from moegeom.studies.cells.walk.enumeration import AllSubsets, enumerate_cells

SEED = 0


def drawn(experts, dims, seed=SEED):
    random = np.random.default_rng(seed)
    return random.standard_normal((experts, dims)), random.standard_normal(experts)


def logits(weight, bias, point):
    return [
        sum((Fraction(w) * x for w, x in zip(row, point, strict=True)), Fraction(offset))
        for row, offset in zip(weight.tolist(), bias.tolist(), strict=True)
    ]


def is_inside(weight, bias, expert_set, point, tie_broken=False):
    """Chosen before all others; of equal experts the lower number, where ties are broken so."""
    z = logits(weight, bias, point)
    others = [j for j in range(len(z)) if j not in expert_set]

    def is_before(i, j):
        equal = (weight[i] == weight[j]).all() and bias[i] == bias[j]
        return z[i] > z[j] or (tie_broken and equal and i < j)

    return all(is_before(i, j) for i in expert_set for j in others)


@pytest.fixture
def listed(tmp_path):
    """The rows of cells.parquet, every one of them held against the fractions."""

    def run(weight, bias, k, **options):
        number = len(list(tmp_path.iterdir()))
        arrays = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        np.savez(tmp_path / f"{number}.npz", **arrays)
        out = tmp_path / f"out{number}"
        mg.cells(weights=tmp_path / f"{number}.npz", top_k=k, out=out, **options)
        rows = pq.read_table(out / "cells.parquet").to_pylist()
        offset = np.zeros(len(weight)) if bias is None else bias
        for row in rows:
            assert (row["witness"] is None) != (row["witness_exact"] is None)
            if row["witness"] is not None:
                point = [Fraction(x) for x in row["witness"]]
            else:
                proof = from_json(json.loads(row["witness_exact"]))
                point = list(proof.point)
            tie_broken = options.get("tie_broken", False)
            assert is_inside(weight, offset, row["expert_set"], point, tie_broken)
            if "radius" in options:
                assert sum(x * x for x in point) < Fraction(options["radius"]) ** 2
            if "box" in options:
                assert max(abs(x) for x in point) < Fraction(options["box"])
        return rows

    return run


pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("radius", [1e-6, 1.0, 1e6])
def test_a_router_without_bias_has_a_witness_in_every_cell_around_its_origin(radius, listed):
    """All experts tie at the centre: every cell is a cone that begins there."""
    weight, _ = drawn(8, 3)
    rows = listed(weight, None, 2, radius=radius, certify=True)
    whole = enumerate_cells(weight, None, 2)
    assert not isinstance(whole, AllSubsets)
    assert [row["expert_set"] for row in rows] == whole.expert_set.tolist()
    assert all(row["is_checked"] for row in rows)


def test_a_centre_on_a_tie_of_three_has_witnesses_in_all_cells_around_it(listed):
    """Three logits are equal at the origin, and a fourth is below."""
    weight, bias = drawn(6, 2)
    bias[:3], bias[3:] = 0.25, [0.0, -0.5, -9.0]
    rows = listed(weight, bias, 1, radius=0.75, certify=True)
    assert len(rows) >= 3


@pytest.mark.parametrize("radius", [0.5, 2.0])
def test_a_ball_of_equal_experts_is_walked_and_its_witnesses_lie_in_it(radius, listed):
    weight, bias = drawn(7, 2)
    weight, bias = np.vstack([weight, weight[:1]]), np.append(bias, bias[:1])
    listed(weight, bias, 3, radius=radius, certify=True)


def test_of_equal_experts_the_lower_numbers_are_certified(listed):
    weight, bias = drawn(8, 3)
    weight, bias = np.vstack([weight, weight[:2]]), np.append(bias, bias[:2])
    rows = listed(weight, bias, 3, tie_broken=True, certify=True)
    split = [row for row in rows if (0 in row["expert_set"]) != (8 in row["expert_set"])]
    assert split
    assert all(row["is_checked"] for row in rows)
    with pytest.raises(ValueError, match="higher number"):
        check_witness(weight, bias, [1, 2, 8], CellPoint((Fraction(0),) * 3), tie_broken=True)


def test_rows_on_one_line_but_for_rounding_have_rational_witnesses(listed):
    """Cells of a width of 1e-16 at points of size 1: most hold no float64 point."""
    t = np.linspace(-1.0, 1.0, 7)
    rows = listed(np.outer(t, [1 / 3, 0.7]), -(t**2), 3, certify=True)
    assert any(row["witness"] is None for row in rows)
    assert any(row["witness"] is not None for row in rows)


@pytest.mark.parametrize("of_rows", [0, 50, 60, -60, 400, 990])
@pytest.mark.parametrize("of_bias", [0, 50, 60, -60, 400, 990])
def test_powers_of_two_of_rows_and_biases_change_no_cell(of_rows, of_bias, listed):
    weight, bias = drawn(8, 3)
    expected = enumerate_cells(weight, bias, 2)
    assert not isinstance(expected, AllSubsets)
    rows = listed(np.ldexp(weight, of_rows), np.ldexp(bias, of_bias), 2, certify=True)
    assert [row["expert_set"] for row in rows] == expected.expert_set.tolist()
    if abs(of_bias - of_rows) < 900:
        assert all(row["witness"] is not None for row in rows)


def test_columns_of_very_different_sizes_change_no_cell(listed):
    weight, bias = drawn(8, 3)
    expected = enumerate_cells(weight, bias, 2)
    assert not isinstance(expected, AllSubsets)
    rows = listed(weight * [2.0**990, 1.0, 2.0**-990], bias, 2, certify=True, inradius=True)
    assert [row["expert_set"] for row in rows] == expected.expert_set.tolist()


@pytest.mark.parametrize("exponent", [-960, -60, -24, -20, 20, 60, 960])
def test_a_ball_and_a_box_scale_with_the_biases(exponent, listed):
    weight, bias = drawn(8, 2)
    size = 2.0**exponent
    for option in ("radius", "box"):
        one = listed(weight, bias, 2, **{option: 1.0}, certify=True)
        other = listed(weight, bias * size, 2, **{option: size}, certify=True)
        assert [row["expert_set"] for row in one] == [row["expert_set"] for row in other]


@pytest.mark.parametrize("exponent", [-990, -300, -60, -24, -20, 0, 20, 60, 300, 990])
def test_the_largest_balls_scale_with_the_biases(exponent, listed):
    """Also where a radius is below what a solver tolerates, and far above."""
    weight, bias = drawn(8, 2)
    plain = [row["inradius"] for row in listed(weight, bias, 2, inradius=True)]
    scaled = listed(weight, np.ldexp(bias, exponent), 2, inradius=True)
    assert None not in plain
    assert 0 < sum(np.isinf(plain)) < len(plain)
    found = np.ldexp(np.array([row["inradius"] for row in scaled]), -exponent)
    np.testing.assert_allclose(found, plain, rtol=2e-6)


@pytest.mark.parametrize("squeeze", [1.0, 2.0**-10, 2.0**-20])
def test_the_largest_ball_touches_facets_and_crosses_none(squeeze):
    """Thin cells: no centre on a grid has a larger ball, and the best has nearly as large a one."""
    weight, bias = drawn(8, 2)
    weight = weight * [1.0, squeeze]
    found = enumerate_cells(weight, bias, 2)
    assert not isinstance(found, AllSubsets)
    radii = inradii(weight, bias, found.expert_set, found.facets)
    assert (radii > 0.0)[~np.isnan(radii)].all()
    for n in np.flatnonzero(np.isfinite(radii)):
        chosen = found.expert_set[n].astype(int)
        others = np.setdiff1d(np.arange(8), chosen)
        slope = (weight[chosen][:, None] - weight[others][None]).reshape(-1, 2)
        free = (bias[chosen][:, None] - bias[others][None]).reshape(-1)
        length = np.linalg.norm(slope, axis=1)
        best = -np.inf
        at, step = found.witness[n], np.full(2, 8.0 * radii[n]) / [1.0, squeeze]
        for _ in range(60):
            grid = np.stack(np.meshgrid(*np.linspace(-1, 1, 9)[None].repeat(2, 0)), -1)
            points = at + grid.reshape(-1, 2) * step
            inner = ((points @ slope.T + free) / length).min(axis=1)
            at, best, step = points[inner.argmax()], max(best, inner.max()), step * 0.7
        assert best <= radii[n] * (1.0 + 2e-6)
        assert best >= radii[n] * 0.5


def test_a_witness_is_rejected_that_lies_in_another_cell():
    weight, bias = drawn(6, 2)
    found = enumerate_cells(weight, bias, 2)
    assert not isinstance(found, AllSubsets)
    wrong = np.roll(found.witness, 1, axis=0)
    made = strict_witnesses(weight, bias, found.expert_set, wrong)
    for expert_set, point in zip(found.expert_set.tolist(), made.point.tolist(), strict=True):
        assert is_inside(weight, bias, expert_set, [Fraction(x) for x in point])
    nowhere = np.array([[0, 1]], np.int16)
    cells_there = {tuple(row) for row in found.expert_set.tolist()}
    missing = next((i, j) for i in range(6) for j in range(i + 1, 6) if (i, j) not in cells_there)
    nowhere[0] = missing
    with pytest.raises(ValueError, match="no cell"):
        strict_witnesses(weight, bias, nowhere, np.zeros((1, 2)))


@pytest.mark.parametrize("dims", [1, 2])
def test_more_experts_than_fit_are_refused(dims, listed):
    weight, bias = drawn(40_000, dims)
    with pytest.raises(UsageError, match="40,000 experts; expected at most 32,768"):
        listed(weight, bias, 2)
    with pytest.raises(ValueError, match="40000 experts"):
        enumerate_cells(weight, bias, 2)
