"""Rows, their projections, their Gram matrix, its score and spectrum: by hand, free of gauges."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal, assert_equal

from moegeom.geometry import gram
from moegeom.geometry import rows as row_forms


@pytest.fixture
def random():
    return np.random.default_rng(5)


@pytest.fixture
def weight(random):
    return random.standard_normal((6, 9)).astype(np.float32)


# ---------------------------------------------------------------------------------- effective rows
def test_the_worked_pair_and_a_common_shift_that_moves_the_mean_alone(weight, random):
    rows = gram.effective_rows(np.array([[1.0, 2.0], [3.0, 2.0]]), np.array([2.0, 1.0]))
    assert_array_equal(rows.centred, [[-2.0, 0.0], [2.0, 0.0]])
    assert_array_equal(rows.mean, [4.0, 2.0])
    assert_array_equal(rows.gram, [[4.0, -4.0], [-4.0, 4.0]])
    assert_array_equal(rows.squared_norms, [4.0, 4.0])
    plain = gram.effective_rows(weight.astype(np.float64), None)
    shift, order = 30.0 * random.standard_normal(9), random.permutation(6)
    moved = gram.effective_rows((weight + shift)[order], None)
    assert_allclose(moved.centred, plain.centred[order], atol=1e-13)
    assert_allclose(moved.gram, plain.gram[np.ix_(order, order)], atol=1e-12)
    assert_allclose(moved.mean, plain.mean + shift, atol=1e-13)


def test_a_gain_may_stand_in_the_weight_and_powers_that_overflow_are_not_finite(weight, random):
    gain = np.exp2(np.arange(9) - 4.0).astype(np.float32)  # powers of two: no rounding
    beside, folded = gram.effective_rows(weight, gain), gram.effective_rows(weight * gain, None)
    assert_array_equal(beside.centred, folded.centred)
    assert_array_equal(beside.gram, folded.gram)
    gain, router = random.uniform(0.1, 2.0, 9), weight.astype(np.float64)
    rows = gram.effective_rows(router, gain)
    assert_allclose(rows.centred + rows.mean, weight * gain, atol=1e-15)
    assert_allclose(rows.centred.sum(axis=0), np.zeros(9), atol=1e-14)
    assert_array_equal(router, weight)  # not written to
    long = weight.astype(np.float64)
    long[2] *= 1e200
    assert not gram.effective_rows(long, np.full(9, 1e200)).finite.any()
    assert_array_equal(gram.effective_rows(long, None).finite, np.arange(6) != 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rows_are_zero_and_not_rounding(dtype, random):
    for experts in (1, 2, 3, 7, 60, 256):
        row = (0.1 + random.standard_normal(9)).astype(dtype)
        rows = gram.effective_rows(np.tile(row, (experts, 1)), np.full(9, 0.3))
        assert not rows.centred.any(), experts
        assert not rows.gram.any(), experts


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_left_out_and_such_a_gain_leaves_no_row(bad, weight):
    spoilt = weight.copy()
    spoilt[[1, 4], 2] = bad
    rows, rest = gram.effective_rows(spoilt, None), gram.effective_rows(weight[[0, 2, 3, 5]], None)
    assert_array_equal(rows.finite, [True, False, True, True, False, True])
    assert_array_equal(rows.centred, rest.centred)
    assert_array_equal(rows.mean, rest.mean)
    weight[:, 3] = 0.0  # inf * 0 is not a number either
    none = gram.effective_rows(weight, np.array([1.0] * 3 + [bad] + [1.0] * 5))
    assert not none.finite.any()
    assert (none.centred.shape, none.gram.shape) == ((0, 9), (0, 0))
    assert_array_equal(none.mean, np.zeros(9))


# ------------------------------------------------------------------------------------------- score
def cosines_of(rows):
    rows = np.asarray(rows, np.float64)
    return gram.cosines(rows @ rows.T)


def score(rows):
    return gram.gram_score(cosines_of(rows))


def test_scores_by_hand_leave_zero_rows_out_and_need_two_rows(random):
    rows = [[1, 0], [1, 1], [0, 2]]
    assert_allclose(score(rows), 1 - 1 / np.sqrt(3), atol=1e-12)
    assert_allclose(gram.mean_absolute_cosine(cosines_of(rows)), np.sqrt(2) / 3, rtol=1e-15)
    rotation = np.linalg.qr(random.standard_normal((5, 5)))[0]
    assert_allclose(score(rotation), 1.0, atol=1e-15)
    # on one line, whatever their sense
    assert_allclose(score([[1, 2], [2, 4], [-3, -6]]), 0.0, atol=1e-15)
    rows = random.standard_normal((4, 3))
    with_zeros = np.vstack([rows[:2], np.zeros((1, 3)), rows[2:]])
    assert_allclose(score(with_zeros), score(rows), rtol=1e-15)
    is_nan = np.isnan(cosines_of(with_zeros))
    assert_array_equal(is_nan[2], True)
    assert_array_equal(is_nan[0], [False, False, True, False, False])
    for few in (np.empty((0, 3)), np.ones((1, 3)), np.zeros((4, 3)), [[1], [0]]):
        assert_equal([score(few), gram.mean_absolute_cosine(cosines_of(few))], [np.nan] * 2)
    for figure in (gram.random_gram_score, gram.random_gram_score_sd, gram.best_gram_score):
        assert_equal([figure(n, 8, c) for n in (0, 1) for c in (False, True)], [np.nan] * 4)


def test_no_cosine_is_larger_than_one(random):
    rows = np.repeat(random.standard_normal((20, 7)), 2, axis=0) * random.uniform(0, 1, (40, 1))
    assert np.abs(cosines_of(rows)).max() == 1.0


def test_the_best_score_is_reached_by_tetrahedron_and_simplex_and_by_no_rows_passed(random):
    tetrahedron = [[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]
    assert_allclose([gram.best_gram_score(4, 3, False), score(tetrahedron)], 2 / 3, rtol=1e-14)
    for experts in (2, 3, 8, 50):
        best = gram.best_gram_score(experts, experts + 3, is_centred=True)
        assert_allclose(score(np.eye(experts) - 1.0 / experts), best, atol=1e-14)
        assert_allclose(best, 1 - 1 / (experts - 1), atol=1e-15)
    for experts, hidden in ((4, 3), (9, 2), (3, 8), (2, 1), (12, 12)):
        for is_centred in (False, True):
            best = gram.best_gram_score(experts, hidden, is_centred)
            for _ in range(100):
                rows = random.standard_normal((experts, hidden))
                assert score(rows - is_centred * rows.mean(axis=0)) < best + 1e-12
    # two centred rows are opposite, so chance says zero
    assert_allclose(gram.random_gram_score(2, 40, is_centred=True), 0.0, atol=1e-15)


# ---------------------------------------------------------------------------------------- spectrum
def spectrum(rows, is_centred=False):
    rows = np.asarray(rows, np.float64)
    return gram.row_spectrum(rows @ rows.T, rows.shape[1], is_centred)


def centred_spectrum(weight):
    return gram.row_spectrum(gram.effective_rows(weight, None).gram, weight.shape[1], True)


def figures(of_rows):
    return [of_rows.rank, of_rows.largest_possible_rank, of_rows.condition, of_rows.effective_rank]


@pytest.mark.parametrize(
    ("experts", "hidden", "raw", "centred"),
    [(4, 9, 4, 3), (9, 4, 4, 4), (4, 4, 4, 3), (5, 4, 4, 4)],
)
def test_centring_costs_a_rank_only_where_dimensions_suffice(experts, hidden, raw, centred, random):
    weight = random.standard_normal((experts, hidden))
    assert figures(spectrum(weight))[:2] == [raw, raw]
    assert figures(centred_spectrum(weight))[:2] == [centred, centred]
    assert np.isfinite(centred_spectrum(weight).condition)


def test_each_duplicate_row_costs_a_rank_and_equal_rows_have_no_spectrum(random):
    for duplicates in (1, 3):
        weight = random.standard_normal((8, 40)).astype(np.float32)
        weight[-duplicates:] = weight[0]
        assert figures(centred_spectrum(weight))[:3] == [7 - duplicates, 7, np.inf]
    for nothing, possible in (
        (spectrum(np.zeros((3, 5))), 3),
        (centred_spectrum(np.full((3, 5), 0.1)), 2),
        (centred_spectrum(np.ones((1, 5))), 0),
        (spectrum(np.empty((0, 5)), is_centred=True), 0),
    ):
        assert_equal(figures(nothing), [0, possible, np.nan, np.nan])


# ---------------------------------------------------------------------- composed and projected rows
def test_rows_by_hand() -> None:
    rows = row_forms.unit_length(np.array([[3.0, 4.0], [0.0, 0.0], [-2.0, 0.0]], np.float32))
    assert_allclose(rows, [[0.6, 0.8], [0.0, 0.0], [-1.0, 0.0]], rtol=1e-15)
    projection = np.array([[5.0, 0.0, 10.0], [0.0, 5.0, 0.0]], np.float32)
    weight, bias = row_forms.composed_rows(
        np.array([[3.0, 4.0]]), projection, np.array([10.0, -5.0])
    )
    assert_allclose(weight, [[3.0, 4.0, 6.0]], rtol=1e-15)
    assert_allclose(bias, [2.0], rtol=1e-15)
    assert row_forms.composed_rows(np.array([[3.0, 4.0]]), projection, None)[1] is None
    # the scale is over the length, and finite at zero
    assert_allclose(row_forms.cosine_scale(np.array([2.0, 0.0]), 3.0), [1.5, 3e12])


@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 5), st.integers(1, 9))
def test_the_affine_map_is_the_two_steps_within_the_stated_bound(seed, experts, width, hidden):
    random = np.random.default_rng(seed)
    rows = random.standard_normal((experts, width)).astype(np.float32)
    projection = random.standard_normal((width, hidden)).astype(np.float32)
    weight, _ = row_forms.composed_rows(rows, projection, None)
    exact = rows.astype(np.longdouble)
    exact /= np.sqrt((exact**2).sum(axis=1, keepdims=True))
    terms = (width + 4) * 2.0**-53
    bound = terms / (1.0 - terms) * (np.abs(exact) @ np.abs(projection.astype(np.longdouble)))
    assert (np.abs(exact @ projection.astype(np.longdouble) - weight) < bound + 1e-300).all()


def test_the_numbers_are_fixed_in_every_process_and_differ_between_sizes():
    """A change of them makes every stored baseline worthless."""
    first = row_forms.projection_matrix(3, 2)[0]
    assert_allclose(first, [-0.5384130151920838, -0.9562103996867505], rtol=1e-15)
    program = (
        "from moegeom.geometry import rows; print(rows.projection_matrix(40, 5).tobytes().hex())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert other.stdout.decode().strip() == row_forms.projection_matrix(40, 5).tobytes().hex()
    a, b = row_forms.projection_matrix(8, 4), row_forms.projection_matrix(8, 5)
    assert np.abs(a * 2.0 - b[:, :4] * np.sqrt(5.0)).max() > 0.01


def test_distances_keep_their_mean_square_and_spread_by_an_eighth():
    """Standard deviation 1 / sqrt(2 count), 12.5 % for 32."""
    random = np.random.default_rng(2)
    rows = random.standard_normal((80, 4096)) * random.uniform(0.1, 10, (80, 1))
    short = row_forms.projected(rows, 32)
    i, j = np.triu_indices(80, 1)
    ratio = np.linalg.norm(short[i] - short[j], axis=1) / np.linalg.norm(rows[i] - rows[j], axis=1)
    assert_allclose(np.mean(ratio**2), 1.0, atol=0.08)
    assert_allclose(ratio.std(), 0.125, atol=0.02)
    # centring may come before or after
    before, after = row_forms.projected(rows - rows.mean(axis=0), 6), row_forms.projected(rows, 6)
    assert_allclose(before, after - after.mean(axis=0), atol=1e-11)
    assert_array_equal(row_forms.projected(np.zeros((2, 9)), 4), np.zeros((2, 4)))
    assert row_forms.projected(np.empty((0, 9)), 4).shape == (0, 4)
