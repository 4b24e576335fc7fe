"""Certificates and witnesses: certified instances, HiGHS, logits in fractions, and planted errors."""

import contextlib
import dataclasses
import json
from fractions import Fraction
from itertools import combinations, permutations, product
from math import comb

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as some_array

import moegeom as mg
from moegeom.core.errors import UsageError
from moegeom.routing_cells.exact.certificate import (
    cell_certificate,
    check_witness,
    solve_strictly,
    strict_witnesses,
)
from moegeom.routing_cells.exact.certificate_check import CellPoint, NoCell, check_certificate
from moegeom.routing_cells.walk.enumeration import enumerate_cells
from tests.by_day import IS_NIGHT, by_day
from tests.oracle import helpers
from tests.oracle.exact_cells import certificate_of, exact_cells, expert_sets
from tests.oracle.helpers import SMALL, ahead, arrays, choices, digest, router, rows_of

#: By day those with few subsets.
FEW = [i for i in SMALL if comb(i["E"], i["k"]) <= 60]


def certified_cells(weight, bias, k):
    """The subsets that have a point; every certificate is checked, and comes back from its text."""
    cells = []
    for subset in combinations(range(len(weight)), k):
        certificate = cell_certificate(weight, bias, subset)
        check_certificate(weight, bias, subset, certificate)
        assert certificate_of(json.loads(json.dumps(certificate.as_json()))) == certificate
        if isinstance(certificate, CellPoint):
            cells.append(subset)
    return cells


@pytest.mark.parametrize("instance", by_day(SMALL, FEW), ids=lambda instance: instance["name"])
def test_every_subset_has_a_certificate_and_those_with_a_point_are_the_cells(instance):
    cells = certified_cells(*arrays(instance), instance["k"])
    assert len(cells) == instance["n_cells"]
    assert digest(cells) == instance["cells_sha1"]


@st.composite
def small_integer_routers(draw):
    experts, dims = draw(st.integers(2, 5 if IS_NIGHT else 4)), draw(st.integers(1, 3))
    entries = st.integers(-2, 2).map(float)
    weight = draw(some_array(np.float64, (experts, dims), elements=entries))
    bias = draw(st.none() | some_array(np.float64, experts, elements=entries))
    return weight, bias, draw(st.integers(1, experts))


@given(small_integer_routers())
def test_degenerate_routers_have_the_cells_of_the_exact_walk(router):
    weight, bias, k = router
    found = exact_cells(weight, np.zeros(len(weight)) if bias is None else bias, k)
    assert certified_cells(weight, bias, k) == expert_sets(found)


@pytest.mark.parametrize(
    ("experts", "d", "k", "seed"), [(10, 2, 3, 1), (9, 4, 4, 2), (12, 6, 2, 3)]
)
def test_random_routers_agree_with_all_pairs_in_highs(experts, d, k, seed):
    """The oracle has a constraint for each pair, in x alone, and a box far out."""
    weight, bias = router(experts, d, seed)
    answers = set()
    subsets = np.tile(np.arange(experts), (20, 1))
    for subset in np.random.default_rng(seed).permuted(subsets, axis=1)[:, :k]:
        chosen = subset.tolist()
        leads = ahead(weight, bias, chosen, sorted(set(range(experts)) - set(chosen)))
        margin = helpers.largest_margin(*leads, bounds=[(-1e5, 1e5)] * d)
        assert abs(margin) > 1e-7  # no close call among these seeds
        certificate = cell_certificate(weight, bias, chosen)
        check_certificate(weight, bias, chosen, certificate)
        assert isinstance(certificate, CellPoint) == (margin > 0)
        answers.add(type(certificate))
    assert answers == {CellPoint, NoCell}


@given(
    st.lists(
        st.lists(st.integers(-3, 3).map(Fraction), min_size=3, max_size=3), min_size=1, max_size=6
    )
)
def test_exact_steps_end_with_a_point_or_with_multipliers_from_any_start(rows):
    answers = set()
    for start in list(permutations(rows))[:24]:
        found = solve_strictly(start)
        answers.add(type(found))
        if isinstance(found, tuple):
            assert all(
                r[0] + sum(a * x for a, x in zip(r[1:], found, strict=True)) > 0 for r in start
            )
        else:
            assert min(found) >= 0 < max(found)
            total = [sum(y * r[m] for y, r in zip(found, start, strict=True)) for m in range(3)]
            assert total[0] <= 0 == total[1] == total[2]
    assert len(answers) == 1


def whole_router():
    weight, bias = router(24, 200)
    return weight.astype(np.float32).astype(np.float64), bias


@pytest.mark.parametrize("scale", by_day([1e-300, 1e-150, 1e150, 1e300], [1e-300, 1e150]))
def test_badly_scaled_rows_are_decided_exactly(scale):
    weight, bias = router(7, 2, 5)
    weight[::2] *= scale
    assert certified_cells(weight, bias, 2) == expert_sets(exact_cells(weight, bias, 2))


def test_subsets_at_the_corners_and_of_whole_routers_are_cells_unless_rows_depend():
    nothing, bias = np.zeros((4, 0)), np.array([3.0, 1.0, 2.0, 0.0])
    assert cell_certificate(nothing, bias, [0, 2]) == CellPoint(())
    assert cell_certificate(nothing, bias, [0, 1]) == NoCell(
        ((1, Fraction(1)),), ((2, Fraction(1)),)
    )
    assert isinstance(cell_certificate(np.zeros((3, 2)), None, [0, 1]), NoCell)
    assert isinstance(cell_certificate(np.zeros((3, 2)), None, [0, 1, 2]), CellPoint)
    assert isinstance(cell_certificate(np.ones((1, 2)), None, [0]), CellPoint)
    central = np.array([[1.0], [-1.0], [0.0]])
    assert isinstance(cell_certificate(central, None, [2]), NoCell)
    weight, bias = whole_router()
    generator = np.random.default_rng(1)
    for _ in range(5):
        order = generator.permutation(24).tolist()
        certificate = cell_certificate(weight, bias, order[:5])
        assert isinstance(certificate, CellPoint)
        check_certificate(weight, bias, order[:5], certificate)
    weight[5], bias[5] = (weight[3] + weight[4]) / 2, (bias[3] + bias[4]) / 2 + 1.0
    certificate = cell_certificate(weight, bias, [3, 4, 9])
    assert {expert for expert, _ in certificate.inside} == {3, 4}
    assert certificate.outside == ((5, Fraction(1)),)
    check_certificate(weight, bias, [3, 4, 9], certificate)
    # a point that ties the mixture with both is above it at one of them
    assert isinstance(cell_certificate(weight, bias, [3, 5, 9]), CellPoint)
    weight, bias = whole_router()
    weight[5], bias[5] = weight[3] * (1.0 + 1e-13), bias[3]
    certificate = cell_certificate(weight, bias, [3, 7, 9])
    assert isinstance(certificate, CellPoint)
    check_certificate(weight, bias, [3, 7, 9], certificate)
    # Rows that are dependent in the longest columns alone are told apart by a short one.
    generator = np.random.default_rng(4)
    weight = np.zeros((4, 40))
    weight[:, :39] = np.round(generator.standard_normal((4, 39)) * 2.0**20)
    weight[3, :39] = weight[0, :39] + weight[1, :39] - weight[2, :39]
    weight[3, 39] = 2.0**-60
    certificate = cell_certificate(weight, None, [2, 3])
    assert isinstance(certificate, CellPoint)
    check_certificate(weight, None, [2, 3], certificate)
    weight[3, 39] = 0.0
    proof = cell_certificate(weight, None, [2, 3])
    check_certificate(weight, None, [2, 3], proof)
    assert isinstance(proof, NoCell)


def test_questions_without_meaning_are_refused():
    plain = {"weight": np.array([[1.0], [0.0]]), "bias": None, "expert_set": [0]}
    for message, *changes in (
        ("finite", {"weight": np.array([[np.nan], [0.0]])}, {"bias": np.array([np.inf, 0.0])}),
        ("no set", *({"expert_set": some} for some in ([], [0, 0], [2], [-1]))),
    ):
        for change in changes:
            with pytest.raises(ValueError, match=message):
                cell_certificate(**plain | change)


def claims():
    """A router with certificates of a cell and of a subset that is none."""
    weight, bias = arrays(next(i for i in SMALL if i["name"] == "g_8_2_2"))
    cells = expert_sets(exact_cells(weight, bias, 2))
    empty = next(some for some in combinations(range(8), 2) if some not in cells)
    proofs = [(some, cell_certificate(weight, bias, some)) for some in (cells[0], empty)]
    return weight, bias, proofs


def test_certificates_of_a_claim_prove_no_other_and_witnesses_no_other_cell():
    weight, bias, proofs = claims()
    assert [type(proof) for _, proof in proofs] == [CellPoint, NoCell]
    for subset, proof in proofs:
        check_certificate(weight, bias, subset, proof)
        for other, _ in proofs:
            if other != subset:
                with pytest.raises(ValueError, match=r"."):
                    check_certificate(weight, bias, other, proof)
        with pytest.raises(ValueError, match="finite"):
            check_certificate(weight * np.nan, bias, subset, proof)
    weight, bias = router(6, 2)
    found = enumerate_cells(weight, bias, 2)
    wrong = np.roll(found.witness, 1, axis=0)
    points, _ = strict_witnesses(weight, bias, found.expert_set, wrong)
    for expert_set, point in zip(found.expert_set.tolist(), points.tolist(), strict=True):
        assert is_inside(weight, bias, expert_set, [Fraction(x) for x in point])
    missing = next(pair for pair in combinations(range(6), 2) if pair not in
                   set(rows_of(found.expert_set)))  # fmt: skip
    with pytest.raises(ValueError, match="no cell"):
        strict_witnesses(weight, bias, np.array([missing], np.int16), np.zeros((1, 2)))


def altered(certificate):
    """The certificate with each of its numbers and experts changed, one at a time."""
    for field in dataclasses.fields(certificate):
        values = getattr(certificate, field.name)
        for m, entry in enumerate(values):
            changed = (
                [entry + 1000, entry - 1000]
                if isinstance(entry, Fraction)
                else [(entry[0], entry[1] + 1), (entry[0], -entry[1]), (99, entry[1])]
            )
            for other in changed:
                wrong = (*values[:m], other, *values[m + 1 :])
                yield dataclasses.replace(certificate, **{field.name: wrong})
        yield dataclasses.replace(certificate, **{field.name: values[1:]})
        yield dataclasses.replace(certificate, **{field.name: (*values, values[0])})


def test_a_certificate_with_one_change_is_refused():
    weight, bias, proofs = claims()
    for subset, certificate in proofs:
        changes = list(altered(certificate))
        assert len(changes) >= 6
        for wrong in changes:
            with contextlib.suppress(ValueError):
                check_certificate(weight, bias, subset, wrong)
                # a cell is open: a far point may lie in it as well
                assert isinstance(wrong, CellPoint)
                point = np.array([[float(x) for x in wrong.point]])
                assert rows_of(choices(point, weight, bias, 2)) == [tuple(subset)]


def test_what_proves_no_point_inside_is_refused():
    weight, point = np.array([[1.0], [0.0]]), CellPoint((Fraction(0),))
    with pytest.raises(ValueError, match="expert 0 is not above expert 1"):
        check_certificate(weight, None, [0], point)
    with pytest.raises(ValueError, match="has 1 coordinates, not 2"):
        check_certificate(np.ones((2, 2)), None, [0], point)
    wrong = NoCell(((0, Fraction(1)),), ((1, Fraction(1)),))
    with pytest.raises(ValueError, match="without end"):
        check_certificate(weight, None, [0], wrong)


def test_weights_that_are_no_means_or_leave_room_prove_nothing():
    weight, bias = np.zeros((3, 1)), np.array([1.0, 0.5, 3.0])
    for inside, outside, message in (
        # 1 against 0.5: positive, if below 1
        ({0: 1}, {1: 1}, "positive somewhere"),
        # 2 * 1 - 3 = -1 is below everything, but no mean
        ({0: 2, 2: -1}, {1: 1}, "weight of expert 2 is not allowed"),
        ({0: 1}, {1: 3}, "do not sum to 1"),
        ({0: Fraction(1, 3)}, {1: 1}, "do not sum to 1"),
        ({1: 1}, {0: 1}, "weight of expert 1 is not allowed"),
    ):
        sides = (tuple((e, Fraction(v)) for e, v in side.items()) for side in (inside, outside))
        with pytest.raises(ValueError, match=message):
            check_certificate(weight, bias, [0, 2], NoCell(*sides))


# ---------------------------------------------------------------------------------------- witnesses


def is_inside(weight, bias, expert_set, point, tie_broken=False):
    """Chosen before all others; of equal experts the lower number, where ties are broken so."""
    z = helpers.exact_logits(weight, bias, point)
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
                point = list(certificate_of(json.loads(row["witness_exact"])).point)
            tie_broken = options.get("tie_broken", False)
            assert is_inside(weight, offset, row["expert_set"], point, tie_broken)
        return rows

    return run


pytestmark = pytest.mark.filterwarnings("error")


def test_a_router_without_bias_has_a_witness_in_every_cell_around_its_origin(listed):
    """All experts tie at the centre: every cell is a cone that begins there."""
    weight, _ = router(8, 3)
    rows = listed(weight, None, 2, certify=True)
    whole = enumerate_cells(weight, None, 2)
    assert [row["expert_set"] for row in rows] == whole.expert_set.tolist()
    assert all(row["is_checked"] for row in rows)


def test_lower_numbers_and_rows_on_one_line_have_their_witnesses(listed):
    """Cells of a width of 1e-16 at points of size 1: most hold no float64 point."""
    t = np.linspace(-1.0, 1.0, 7)
    rows = listed(np.outer(t, [1 / 3, 0.7]), -(t**2), 3, certify=True)
    assert any(row["witness"] is None for row in rows)
    assert any(row["witness"] is not None for row in rows)
    weight, bias = router(8, 3)
    expected = enumerate_cells(weight, bias, 2)
    rows = listed(weight * [2.0**990, 1.0, 2.0**-990], bias, 2, certify=True)
    assert [row["expert_set"] for row in rows] == expected.expert_set.tolist()
    weight, bias = with_copies(*router(8, 3), 2)
    rows = listed(weight, bias, 3, tie_broken=True, certify=True)
    assert any((0 in row["expert_set"]) != (8 in row["expert_set"]) for row in rows)
    assert all(row["is_checked"] for row in rows)
    with pytest.raises(ValueError, match="higher number"):
        check_witness(weight, bias, [1, 2, 8], CellPoint((Fraction(0),) * 3), tie_broken=True)


def with_copies(weight, bias, count):
    """A router whose last experts are its first."""
    return np.vstack([weight, weight[:count]]), np.append(bias, bias[:count])


POWERS = [0, 50, 60, -60, 400, 990]
POWERS_BY_DAY = {
    "as they are": (0, 0),
    "below what float64 holds of both": (50, 0),
    "beyond it": (0, 60),
    "small rows": (-60, 0),
    "small biases": (60, -60),
    "large": (400, 400),
    "the largest": (990, 990),
    "no float64 point": (990, -60),
    "far away": (-60, 990),
}


@pytest.mark.parametrize(("of_rows", "of_bias"), by_day(product(POWERS, POWERS), POWERS_BY_DAY))
def test_powers_of_two_of_rows_and_biases_change_no_cell(of_rows, of_bias, listed):
    weight, bias = router(8, 3)
    expected = enumerate_cells(weight, bias, 2)
    rows = listed(np.ldexp(weight, of_rows), np.ldexp(bias, of_bias), 2, certify=True)
    assert [row["expert_set"] for row in rows] == expected.expert_set.tolist()
    if abs(of_bias - of_rows) < 900:
        assert all(row["witness"] is not None for row in rows)


@pytest.mark.parametrize("dims", [1, 2])
def test_more_experts_than_fit_are_refused(dims, listed):
    weight, bias = router(40_000, dims)
    with pytest.raises(UsageError, match="40,000 experts; expected at most 32,768"):
        listed(weight, bias, 2)
    with pytest.raises(ValueError, match="40000 experts"):
        enumerate_cells(weight, bias, 2)
