"""Crossings along segments against all pairs of lines: where they meet, sorted, in fractions."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from moegeom.studies.cells.exact.crossings import crossing_rate, exact_crossings
from moegeom.studies.cells.exact.exact_cells import sweep
from moegeom.studies.cells.walk.segment_crossings import segment_crossings

KINDS = {
    "random": lambda r, n, e: r.standard_normal((2, n, e)),
    "ties": lambda r, n, e: r.integers(-2, 3, (2, n, e)).astype(float),
    "few_values": lambda r, n, e: r.integers(0, 2, (2, n, e)).astype(float),
    "identical_ends": lambda r, n, e: np.repeat(r.integers(-3, 3, (1, n, e)), 2, 0).astype(float),
    "identical_experts": lambda r, n, e: np.repeat(r.standard_normal((2, n, 1)), e, 2),
    "duplicates": lambda r, n, e: np.repeat(r.standard_normal((2, n, (e + 1) // 2)), 2, 2)[
        :, :, :e
    ],
    "float32": lambda r, n, e: r.standard_normal((2, n, e)).astype(np.float32),
    "near_ties": lambda r, n, e: (
        r.integers(-2, 3, (2, n, e)) * (1 + 2.0**-52 * r.integers(-2, 3, (2, n, e)))
    ),
    "through_one_point": lambda r, n, e: (
        np.array([-1.0, 1.0])[:, None, None] * r.standard_normal((n, e))
    ),
    "tiny": lambda r, n, e: r.standard_normal((2, n, e)) * 1e-310,
    "products_underflow": lambda r, n, e: r.standard_normal((2, n, e)) * 1e-161,
    "huge": lambda r, n, e: r.standard_normal((2, n, e)) * 1e307,
}
SHAPES = [(2, 1), (5, 2), (5, 4), (6, 6), (9, 3)]


def top(values, k):
    return set(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])


def by_all_pairs(start, stop, k):
    """(t, out, into) for each change, from the sets at the ends and between all places of ties."""
    a, b = ([Fraction(float(value)) for value in row] for row in (start, stop))
    meet = set()
    for i, j in itertools.combinations(range(len(a)), 2):
        rate = (b[i] - a[i]) - (b[j] - a[j])
        if rate and 0 < (a[j] - a[i]) / rate < 1:
            meet.add((a[j] - a[i]) / rate)
    places = [Fraction(0), *sorted(meet), Fraction(1)]
    sets = [top(a, k)]
    for left, right in itertools.pairwise(places):
        t = (left + right) / 2
        sets.append(top([(1 - t) * x + t * y for x, y in zip(a, b, strict=True)], k))
    sets.append(top(b, k))
    found = []
    for at, before, after in zip(places, sets[:-1], sets[1:], strict=True):
        if before != after:
            found.append((at, tuple(sorted(before - after)), tuple(sorted(after - before))))
    return found


def pairs(kind, experts, k, number=30):
    random = np.random.default_rng([sum(map(ord, kind)), experts, k])
    return KINDS[kind](random, number, experts)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("experts", "k"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_exact_crossings_are_the_changes_between_all_ties(kind, experts, k):
    for start, stop in zip(*map(np.float64, pairs(kind, experts, k)), strict=True):
        found = [(c.at, c.out, c.into) for c in exact_crossings(start, stop, k)]
        assert found == by_all_pairs(start, stop, k)


@pytest.mark.parametrize("k", [1, 5, 11])
def test_exact_crossings_are_the_breaks_of_the_sweep_that_lie_on_the_segment(k):
    for start, stop in zip(*np.random.default_rng(k).standard_normal((2, 20, 24)), strict=True):
        a, b = ([Fraction(value) for value in row] for row in (start.tolist(), stop.tolist()))
        slope = [y - x for x, y in zip(a, b, strict=True)]
        breaks = [left for _, left, _ in sweep(slope, a, k) if left is not None]
        found = [crossing.at for crossing in exact_crossings(start, stop, k)]
        assert found == [at for at in breaks if 0 < at < 1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("experts", "k"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_counts_and_places_are_exact(kind, experts, k):
    a, b = pairs(kind, experts, k)
    found = segment_crossings(a, b, k, with_places=True)
    for segment, (start, stop) in enumerate(zip(a, b, strict=True)):
        wanted = by_all_pairs(start, stop, k)
        assert found.count[segment] == len(wanted)
        own = found.at[found.first[segment] : found.first[segment + 1]]
        np.testing.assert_allclose(own, [float(at) for at, _, _ in wanted], 1e-14, 0)
    assert found.first[-1] == found.count.sum() == len(found.at)


def test_ties_are_settled_exactly_and_nothing_else_is():
    random = np.random.default_rng(0)
    a, b = random.standard_normal((2, 200, 64))
    assert segment_crossings(a, b, 8).num_exact == 0
    a[3, :2], a[5], b[7] = 9.0, 0.0, b[7].round()
    a[9, 1], b[9, 1] = a[9, 0], b[9, 0]  # duplicate rows matter where they cross the boundary only
    found = segment_crossings(a, b, 8)
    assert set(np.flatnonzero(found.is_exact)) - {9} == {5, 7}
    for segment in (3, 5, 7, 9):
        assert found.count[segment] == len(exact_crossings(a[segment], b[segment], 8))


def test_a_third_line_within_rounding_of_a_tie_is_left_to_exact_arithmetic():
    """Line 2 passes the common point of 0 and 1 by less than float64 tells at t = 1/3."""
    a = np.array([[3.0, 0.0, 1.0], [3.0, 0.0, 1.0]])
    b = np.array([[0.0, 6.0, 4.0 + 2.0**-50], [0.0, 6.0, 4.0 - 2.0**-50]])
    found = segment_crossings(a, b, 1)
    assert found.is_exact.all()
    assert found.count.tolist() == [2, 1]


@pytest.mark.parametrize("k", [1, 4, 8])
def test_crossings_are_the_same_both_ways_and_at_least_the_experts_exchanged(k):
    random = np.random.default_rng(k)
    a, b = random.standard_normal((2, 300, 32))
    there, back = segment_crossings(a, b, k), segment_crossings(b, a, k)
    np.testing.assert_array_equal(there.count, back.count)
    exchanged = [len(top(x, k) - top(y, k)) for x, y in zip(a, b, strict=True)]
    assert (there.count >= exchanged).all()
    assert (there.count > exchanged).any()


@pytest.mark.parametrize("k", [2, 6])
def test_complements_change_where_the_chosen_do(k):
    a, b = np.random.default_rng(k).standard_normal((2, 100, 12))
    chosen, rest = (
        segment_crossings(sign * a, sign * b, size, with_places=True)
        for sign, size in ((1, k), (-1, 12 - k))
    )
    np.testing.assert_array_equal(chosen.count, rest.count)
    np.testing.assert_allclose(chosen.at, rest.at, 1e-14, 0)


def test_what_is_no_segment_is_refused():
    a = np.zeros((2, 3))
    with pytest.raises(ValueError, match="top_k 4 of 3"):
        segment_crossings(a, a, 4)
    with pytest.raises(ValueError, match="shapes"):
        segment_crossings(a, a[:1], 1)
    a[1, 1] = np.nan
    with pytest.raises(ValueError, match="finite"):
        segment_crossings(a, np.zeros((2, 3)), 1)
    with pytest.raises(ValueError, match="finite"):
        exact_crossings(a[1], a[0], 1)
    with pytest.raises(ValueError, match="top_k 0"):
        exact_crossings(a[0], a[0], 0)


def test_no_segments_have_no_crossings():
    found = segment_crossings(np.zeros((0, 4)), np.zeros((0, 4)), 2, with_places=True)
    assert found.count.shape == found.at.shape == (0,)


def test_the_error_of_the_rate_is_that_of_the_bootstrap():
    random = np.random.default_rng(1)
    length = random.uniform(1.0, 3.0, 400)
    count = random.poisson(4.0 * length)
    rate = crossing_rate(count, length)
    drawn = random.integers(0, 400, (4000, 400))
    again = count[drawn].sum(axis=1) / length[drawn].sum(axis=1)
    assert rate.per_length == count.sum() / length.sum()
    np.testing.assert_allclose(rate.standard_error, again.std(), 0.06)
    assert rate.num_segments == 400


def test_a_rate_without_length_is_nan():
    still = crossing_rate(np.zeros(3, np.int64), np.zeros(3))
    assert np.isnan([still.per_length, still.standard_error]).all()
    single = crossing_rate(np.array([4]), np.array([2.0]))
    assert single.per_length == 2.0
    assert np.isnan(single.standard_error)
