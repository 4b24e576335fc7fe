"""Certificates of cells and facets: against the certified instances, HiGHS, and planted errors."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from itertools import combinations, permutations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as some_array
from scipy.optimize import linprog

from moegeom.studies.cells.exact.certificate import (
    cell_certificate,
    facet_certificate,
    solve_strictly,
)
from moegeom.studies.cells.exact.certificate_check import (
    MOST_DIGITS,
    CellPoint,
    FacetPoint,
    NoCell,
    NoFacet,
    check_certificate,
    from_json,
)
from moegeom.studies.cells.exact.exact_cells import exact_cells, expert_sets
from tests.oracle.test_cells_against_certified_instances import SMALL, arrays, digest

FEW = [i for i in SMALL if comb(i["E"], i["k"]) <= 100]
MANY = [i for i in SMALL if comb(i["E"], i["k"]) > 100]


def one_swap_facets(found):
    return {pair for pair in found.facets if len(pair[0] - pair[1]) == 1}


def certified_facets(weight, bias, cells):
    """Facets next to the cells, every answer checked."""
    found = set()
    for cell in cells:
        for out in cell:
            for into in set(range(len(weight))) - cell:
                if out < into:
                    got = facet_certificate(weight, bias, sorted(cell), out, into)
                    check_certificate(weight, bias, sorted(cell), got, swap=(out, into))
                    if isinstance(got, FacetPoint):
                        pair = sorted((cell, cell - {out} | {into}), key=sorted)
                        found.add(tuple(pair))
    return found


@pytest.mark.parametrize(
    "instance",
    [*FEW, *(pytest.param(instance, marks=pytest.mark.nightly) for instance in MANY)],
    ids=lambda instance: instance["name"],
)
def test_every_subset_has_a_certificate_and_those_with_a_point_are_the_cells(instance):
    weight, bias = arrays(instance)
    cells = []
    for subset in combinations(range(len(weight)), instance["k"]):
        certificate = cell_certificate(weight, bias, subset)
        check_certificate(weight, bias, subset, certificate)
        text = json.dumps(certificate.as_json())
        assert from_json(json.loads(text)) == certificate
        if isinstance(certificate, CellPoint):
            cells.append(subset)
    assert len(cells) == instance["n_cells"]
    assert digest(cells) == instance["cells_sha1"]


@pytest.mark.parametrize(
    "name", ["g_8_2_2", "c_8_2_2", "colbint_9_3_3", "near_dup_8_3_2", "duppairs_8_4_2"]
)
def test_facets_with_a_point_are_the_one_swap_facets(name):
    (instance,) = [i for i in SMALL if i["name"] == name]
    weight, bias = arrays(instance)
    found = exact_cells(weight, bias, instance["k"])
    facets = certified_facets(weight, bias, found.cells)
    assert facets == one_swap_facets(found)
    assert len(facets) == instance["n_swap_walls"]


@st.composite
def small_integer_routers(draw):
    experts, dims = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    entries = st.integers(-2, 2).map(float)
    weight = draw(some_array(np.float64, (experts, dims), elements=entries))
    bias = draw(st.none() | some_array(np.float64, experts, elements=entries))
    return weight, bias, draw(st.integers(1, experts))


@given(small_integer_routers())
def test_degenerate_routers_have_the_cells_and_facets_of_the_exact_walk(router):
    weight, bias, k = router
    found = exact_cells(weight, np.zeros(len(weight)) if bias is None else bias, k)
    cells = []
    for subset in combinations(range(len(weight)), k):
        certificate = cell_certificate(weight, bias, subset)
        check_certificate(weight, bias, subset, certificate)
        if isinstance(certificate, CellPoint):
            cells.append(subset)
    assert cells == expert_sets(found)
    assert certified_facets(weight, bias, found.cells) == one_swap_facets(found)


@pytest.mark.parametrize(
    ("experts", "d", "k", "seed"), [(10, 2, 3, 1), (9, 4, 4, 2), (12, 6, 2, 3)]
)
def test_random_routers_agree_with_all_pairs_in_highs(experts, d, k, seed):
    """The oracle has a constraint for each pair, in x alone, and a box far out."""
    generator = np.random.default_rng(seed)
    weight, bias = generator.standard_normal((experts, d)), generator.standard_normal(experts)
    answers = set()
    for subset in generator.permuted(np.tile(np.arange(experts), (40, 1)), axis=1)[:, :k]:
        chosen = subset.tolist()
        others = sorted(set(range(experts)) - set(chosen))
        ahead = np.array([[*(weight[j] - weight[i]), 1.0] for i in chosen for j in others])
        free = np.array([bias[i] - bias[j] for i in chosen for j in others])
        cost = np.append(np.zeros(d), -1.0)
        solved = linprog(cost, ahead, free, bounds=[(-1e5, 1e5)] * d + [(None, 1.0)])
        assert abs(solved.fun) > 1e-7  # no close call among these seeds
        certificate = cell_certificate(weight, bias, chosen)
        check_certificate(weight, bias, chosen, certificate)
        assert isinstance(certificate, CellPoint) == (solved.fun < 0)
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
        found = solve_strictly(start, 0)
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


def whole_router(experts=24, dims=200):
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((experts, dims)).astype(np.float32).astype(np.float64)
    return weight, generator.standard_normal(experts)


def test_every_subset_of_a_whole_router_is_a_cell_with_all_its_facets():
    weight, bias = whole_router()
    generator = np.random.default_rng(1)
    for _ in range(5):
        order = generator.permutation(24).tolist()
        certificate = cell_certificate(weight, bias, order[:5])
        assert isinstance(certificate, CellPoint)
        check_certificate(weight, bias, order[:5], certificate)
        facet = facet_certificate(weight, bias, order[:5], order[0], order[9])
        assert isinstance(facet, FacetPoint)
        check_certificate(weight, bias, order[:5], facet, swap=(order[0], order[9]))


def test_dependent_rows_of_a_whole_router_are_found_and_proved_in_all_columns():
    weight, bias = whole_router()
    weight[5], bias[5] = (weight[3] + weight[4]) / 2, (bias[3] + bias[4]) / 2 + 1.0
    certificate = cell_certificate(weight, bias, [3, 4, 9])
    assert {expert for expert, _ in certificate.inside} == {3, 4}
    assert certificate.outside == ((5, Fraction(1)),)
    check_certificate(weight, bias, [3, 4, 9], certificate)
    # a point that ties the mixture with both is above it at one of them
    assert isinstance(cell_certificate(weight, bias, [3, 5, 9]), CellPoint)


def test_nearly_equal_rows_of_a_whole_router_are_told_apart_by_exact_corrections():
    weight, bias = whole_router()
    weight[5], bias[5] = weight[3] * (1.0 + 1e-13), bias[3]
    certificate = cell_certificate(weight, bias, [3, 7, 9])
    assert isinstance(certificate, CellPoint)
    check_certificate(weight, bias, [3, 7, 9], certificate)


@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1e150, 1e300])
def test_badly_scaled_rows_are_decided_exactly(scale):
    generator = np.random.default_rng(5)
    weight, bias = generator.standard_normal((7, 2)), generator.standard_normal(7)
    weight[::2] *= scale
    found = expert_sets(exact_cells(weight, bias, 2))
    cells = []
    for subset in combinations(range(7), 2):
        certificate = cell_certificate(weight, bias, subset)
        check_certificate(weight, bias, subset, certificate)
        if isinstance(certificate, CellPoint):
            cells.append(subset)
    assert cells == found


def test_corners():
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
    # 2 ties with them, and is between the two on either side
    assert facet_certificate(central, None, [0], 0, 1) == FacetPoint((Fraction(0),))
    assert facet_certificate(central, None, [0, 2], 0, 1) == FacetPoint((Fraction(0),))
    # 2 and 3 would change places there too
    both = np.array([[1.0], [-1.0], [0.5], [-0.5]])
    assert isinstance(facet_certificate(both, None, [0, 2], 0, 1), NoFacet)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.array([[np.nan], [0.0]])}, "finite"),
        ({"bias": np.array([np.inf, 0.0])}, "finite"),
        ({"expert_set": []}, "no set"),
        ({"expert_set": [0, 0]}, "no set"),
        ({"expert_set": [2]}, "no set"),
        ({"expert_set": [-1]}, "no set"),
        ({"lower": np.array([1.0]), "upper": np.array([1.0])}, "not below"),
        ({"lower": np.array([np.nan])}, "not below"),
    ],
)
def test_questions_without_meaning_are_refused(change, message):
    question = {"weight": np.array([[1.0], [0.0]]), "bias": None, "expert_set": [0]} | change
    with pytest.raises(ValueError, match=message):
        cell_certificate(**question)
    for swap in ((1, 0), (0, 0), (0, 2), (0, -1)):
        with pytest.raises(ValueError, match="no expert of the expert set"):
            facet_certificate(np.array([[1.0], [0.0]]), None, [0], *swap)


def known():
    """A router with a cell, a subset that is none, a facet, a pair without one; with certificates."""
    (instance,) = [i for i in SMALL if i["name"] == "g_8_2_2"]
    weight, bias = arrays(instance)
    found = exact_cells(weight, bias, 2)
    cell = next(iter(found.cells))
    empty = next(s for s in combinations(range(8), 2) if frozenset(s) not in found.cells)
    one, other = next(iter(found.facets))
    (out,), (into,) = one - other, other - one
    none = next(
        (i, j)
        for i in one
        for j in set(range(8)) - one
        if tuple(sorted((one, one - {i} | {j}), key=sorted)) not in found.facets
    )
    claims = [
        (sorted(cell), None),
        (list(empty), None),
        (sorted(one), (out, into)),
        (sorted(one), none),
    ]
    return (
        weight,
        bias,
        [
            (
                s,
                p,
                cell_certificate(weight, bias, s)
                if p is None
                else facet_certificate(weight, bias, s, *p),
            )
            for s, p in claims
        ],
    )


def test_certificates_of_a_claim_prove_no_other():
    weight, bias, claims = known()
    assert [type(c) for *_, c in claims] == [CellPoint, NoCell, FacetPoint, NoFacet]
    for subset, swap, certificate in claims:
        check_certificate(weight, bias, subset, certificate, swap=swap)
        for other, pair, _ in claims:
            if (other, pair) != (subset, swap):
                with pytest.raises(ValueError, match=r"."):
                    check_certificate(weight, bias, other, certificate, swap=pair)
        with pytest.raises(ValueError, match="finite"):
            check_certificate(weight * np.nan, bias, subset, certificate, swap=swap)


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
        if field.name != "tied":  # a pair by its type
            yield dataclasses.replace(certificate, **{field.name: values[1:]})
            yield dataclasses.replace(certificate, **{field.name: (*values, values[0])})


@pytest.mark.parametrize("which", range(4))
def test_a_certificate_with_one_change_is_refused(which):
    weight, bias, claims = known()
    subset, swap, certificate = claims[which]
    wrongs = list(altered(certificate))
    assert len(wrongs) >= 6
    survivors = []
    for wrong in wrongs:
        try:
            check_certificate(weight, bias, subset, wrong, swap=swap)
        except ValueError:
            continue
        survivors.append(wrong)
    # a cell or facet is open: a far point may lie in it as well
    assert not survivors or all(isinstance(wrong, CellPoint) for wrong in survivors)
    for wrong in survivors:
        value = weight @ np.array([float(x) for x in wrong.point]) + bias
        assert set(np.argsort(-value)[:2]) == set(subset)


def test_weights_on_an_expert_that_may_tie_prove_no_facet():
    weight = np.array([[1.0], [-1.0], [0.0]])
    wrong = NoFacet(((2, Fraction(1)),), (), (Fraction(-1, 2), Fraction(-1, 2)))
    with pytest.raises(ValueError, match="expert 2 may tie"):
        check_certificate(weight, None, [0, 2], wrong, swap=(0, 1))
    # equal rows cross nowhere, though they tie everywhere
    equal = np.ones((2, 1))
    with pytest.raises(ValueError, match="do not cross"):
        check_certificate(equal, None, [0], FacetPoint((Fraction(0),)), swap=(0, 1))
    proof = facet_certificate(equal, None, [0], 0, 1)
    check_certificate(equal, None, [0], proof, swap=(0, 1))
    assert proof == NoFacet((), (), (Fraction(1), Fraction(-1)))


def test_a_point_on_the_border_is_not_inside():
    weight, point = np.array([[1.0], [0.0]]), CellPoint((Fraction(0),))
    with pytest.raises(ValueError, match="expert 0 is not above expert 1"):
        check_certificate(weight, None, [0], point)
    with pytest.raises(ValueError, match="coordinate 0 is not inside the box"):
        check_certificate(weight, np.array([1.0, 0.0]), [0], point, lower=np.zeros(1))
    with pytest.raises(ValueError, match="has 1 coordinates, not 2"):
        check_certificate(np.ones((2, 2)), None, [0], point)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "object with a kind"),
        ([], "object with a kind"),
        ({"kind": 3}, "object with a kind"),
        ({"kind": "cell"}, "no certificate is of kind 'cell'"),
        ({"kind": "cell_point"}, "has denominator, point and nothing else"),
        ({"kind": "cell_point", "denominator": "0x1", "point": [], "x": 1}, "nothing else"),
        ({"kind": "cell_point", "denominator": "0x0", "point": []}, "not positive"),
        ({"kind": "cell_point", "denominator": "-0x1", "point": []}, "not positive"),
        ({"kind": "cell_point", "denominator": 1, "point": []}, "no string"),
        ({"kind": "cell_point", "denominator": "0x1", "point": {}}, "point is not a list"),
        ({"kind": "cell_point", "denominator": "0x1", "point": ["1e9"]}, "no hexadecimal integer"),
        ({"kind": "cell_point", "denominator": "0x1", "point": ["0x1_0"]}, "no hexadecimal"),
        (
            {"kind": "cell_point", "denominator": "0x1", "point": ["0x" + "1" * MOST_DIGITS]},
            "digits",
        ),
        (
            {"kind": "cell_point", "denominator": "0x1", "point": ["0x" + "1" * 90_000] * 12},
            "digits",
        ),
        ({"kind": "no_cell", "denominator": "0x1", "inside": ["0x1"], "outside": []}, "no pair"),
        (
            {"kind": "no_cell", "denominator": "0x1", "inside": [[True, "0x1"]], "outside": []},
            "pair",
        ),
        (
            {"kind": "no_facet", "denominator": "0x1", "inside": [], "outside": [], "tied": []},
            "two numbers",
        ),
    ],
)
def test_data_that_is_no_certificate_is_refused_with_what_is_wrong(data, message):
    with pytest.raises(ValueError, match=message):
        from_json(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    st.sampled_from(["cell_point", "no_cell", "wall_point", "no_facet"]),
    st.dictionaries(st.sampled_from(["denominator", "point", "inside", "outside", "tied"]), JSON),
    st.sampled_from(["0x1", "-0x3", "0xg"]),
)
def test_any_data_is_a_certificate_or_a_value_error(kind, fields, denominator):
    data = {"kind": kind, "denominator": denominator} | fields
    try:
        found = from_json(data)
    except ValueError as error:
        assert str(error)
    else:
        assert found.as_json()["kind"] == kind


@pytest.mark.parametrize(
    ("inside", "outside", "message"),
    [
        # 1 against 0.5: positive, if below 1
        ({0: "1"}, {1: "1"}, "positive somewhere"),
        # 2 * 1 - 3 = -1 is below everything, but no mean
        ({0: "2", 2: "-1"}, {1: "1"}, "weight of expert 2 is not allowed"),
        ({0: "1"}, {1: "3"}, "do not sum to 1"),
        ({0: "1/3"}, {1: "1"}, "do not sum to 1"),
        ({1: "1"}, {0: "1"}, "weight of expert 1 is not allowed"),
    ],
)
def test_weights_that_are_no_means_or_leave_room_prove_nothing(inside, outside, message):
    weight, bias = np.zeros((3, 1)), np.array([1.0, 0.5, 3.0])
    wrong = NoCell(
        tuple((expert, Fraction(value)) for expert, value in inside.items()),
        tuple((expert, Fraction(value)) for expert, value in outside.items()),
    )
    with pytest.raises(ValueError, match=message):
        check_certificate(weight, bias, [0, 2], wrong)


def test_a_difference_that_grows_without_end_proves_nothing():
    weight = np.array([[1.0], [0.0]])
    wrong = NoCell(((0, Fraction(1)),), ((1, Fraction(1)),))
    with pytest.raises(ValueError, match="without end"):
        check_certificate(weight, None, [0], wrong)
    with pytest.raises(ValueError, match="without end"):
        check_certificate(weight, None, [0], wrong, lower=np.array([-1.0]))
    check_certificate(weight, None, [0], wrong, upper=np.array([0.0]))


def test_columns_that_were_left_out_are_brought_in_where_the_proof_needs_them():
    """Rows that are dependent in the longest columns alone are told apart by a short one."""
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
