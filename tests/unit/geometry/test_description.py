"""Bits: of sets by a model, of contrasts, of patterns; nothing is saved by chance."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import comb, expit

from moegeom.geometry import description as patterns
from moegeom.geometry import set_code

EPSILON = 2.0**-10


# -------------------------------------------------------------------------------------------- sets
def drawn(seed: int, experts: int = 7, k: int = 3, noise: float = 0.3):
    random = np.random.default_rng(seed)
    scores = random.standard_normal((40, experts)).astype(np.float32)
    moved = scores + noise * random.standard_normal(scores.shape)
    return scores, np.argsort(-moved, axis=1)[:, :k]


@pytest.mark.parametrize("temperature", [0.01, 0.2, 3.0])
def test_bits_are_those_of_independent_logistic_choices_or_of_any_set(temperature):
    scores, chosen = drawn(0)
    bits = set_code.set_distances(scores, chosen).bits(temperature)
    for row, experts in enumerate(chosen):
        ranked = np.sort(scores[row].astype(float))[::-1]
        middle = 0.5 * (ranked[2] + ranked[3])
        chance = expit((scores[row] - middle) / temperature)
        own = np.prod([chance[e] if e in experts else 1.0 - chance[e] for e in range(7)])
        expected = -np.log2((1.0 - EPSILON) * own + EPSILON / comb(7, 3))
        assert_allclose(bits[row], expected, rtol=1e-3, atol=1e-4)


def test_what_is_predicted_costs_nothing_as_do_ties_once_their_way_is_said():
    scores, chosen = drawn(0, noise=0.0)
    distances = set_code.set_distances(scores, chosen)
    assert distances.is_met.all()
    assert distances.bits(1e-6).max() < 0.002
    worst = np.argsort(scores, axis=1)[:, :3]
    assert (
        set_code.set_distances(scores, worst).bits(1e-4).max()
        <= 10.0 + set_code.log2_sets(7, 3) + 1e-6
    )
    scores, chosen = drawn(2)
    scores[0] = np.nan
    scores[1, chosen[1, 0]] = -np.inf
    bits = set_code.set_distances(scores, chosen).bits(0.1)
    assert_allclose(bits[:2], 10.0 + set_code.log2_sets(7, 3), rtol=1e-3)
    whole = set_code.set_distances(scores, np.tile(np.arange(7), (40, 1)))
    assert whole.bits(0.1).max() < 1e-9
    scores = np.round(drawn(1, experts=12, k=4)[0])
    first = np.argsort(-scores, axis=1, kind="stable")[:, :4]
    last = 11 - np.argsort(-scores[:, ::-1], axis=1, kind="stable")[:, :4]
    for chosen, way, other in ((first, "lowest", "highest"), (last, "highest", "lowest")):
        distances = set_code.set_distances(scores, chosen)
        assert distances.is_met.all()
        ours, plain, theirs = (distances.bits(1e-3, *by) for by in ((way,), (), (other,)))
        assert ours.max() < 0.2
        assert theirs.sum() > plain.sum() > ours.sum()


def test_the_boundary_lies_between_the_last_chosen_score_and_the_next():
    scores, _ = drawn(3)
    ranked = np.sort(scores, axis=1)[:, ::-1]
    middle, spacing = set_code.boundary(scores, 3)
    assert_allclose(middle, 0.5 * (ranked[:, 2] + ranked[:, 3]), rtol=1e-5)
    assert_allclose(spacing, np.median(ranked[:, 2] - ranked[:, 3]), rtol=1e-5)
    masked = np.where(np.arange(7) < 3, scores, -np.inf)
    assert_array_equal(set_code.boundary(masked, 3)[0], masked[:, :3].min(axis=1))
    assert_array_equal(set_code.chosen_mask(np.array([[0, 2]]), 4), [[True, False, True, False]])


# --------------------------------------------------------------------------------------- contrasts
def test_what_is_common_or_not_finite_costs_nothing_and_scales_of_noise_least():
    random = np.random.default_rng(0)
    recorded, predicted = random.standard_normal((2, 50, 4))
    moved = set_code.contrasts(recorded + random.standard_normal((50, 1)), predicted)
    assert_allclose(moved, set_code.contrasts(recorded, predicted), atol=1e-12)
    assert_allclose(moved.sum(axis=1), 0.0, atol=1e-12)
    recorded = np.array([[0.0, np.nan, 1.0], [np.inf, 0.0, 0.0], [1.0, 2.0, 4.0]])
    bits = set_code.contrast_bits(set_code.contrasts(recorded, np.zeros((3, 3))), 0.5)
    assert_array_equal(bits[:2], 0.0)
    assert bits[2] > 0.0
    random = np.random.default_rng(1)
    apart = set_code.contrasts(0.05 * random.standard_cauchy((4000, 8)), np.zeros((4000, 8)))
    sums = [set_code.contrast_bits(apart, 0.05 * 4.0**power).sum() for power in range(-3, 4)]
    assert abs(int(np.argmin(sums)) - 3) <= 1


@pytest.mark.parametrize("scale", [set_code.FINEST, 0.25])
def test_bits_of_a_pair_one_scale_apart_are_those_of_the_formula(scale):
    apart = np.array([[scale, -scale], [0.0, 0.0]])
    wide = np.log2(scale / set_code.FINEST)
    assert_allclose(set_code.contrast_bits(apart, scale), [wide + 1.0, wide])


# ---------------------------------------------------------------------------------------- patterns
def test_halving_a_row_saves_its_bits_and_the_best_rows_and_columns_are_named():
    saved = patterns.row_bits(
        np.array([2.0, 2.0, 1.0]), np.array([1.0, 0.1, 1.0]), np.array([0.5] * 3), 8
    )
    assert_allclose(saved, [8.0, 16.0, 0.0])
    tiny = np.full(3, 1e-9)
    assert_array_equal(patterns.row_bits(tiny, 0.0 * tiny, np.ones(3), 8), 0.0)
    # a number that explains more costs more
    assert_allclose([patterns.number_bits(3, 256, size, 1.0) for size in (4.0, 1.0)], [18.0, 12.0])
    saved = np.where(np.arange(32) < 5, 100.0, -10.0)
    region, worth = patterns.best_rows(saved, 8)
    assert_array_equal(np.flatnonzero(region.rows), np.arange(5))
    assert 0.0 < region.bits < 100.0
    assert_allclose(worth, 500.0 - region.bits)
    every, total = patterns.best_rows(np.ones(32), 8)
    assert (every.is_whole, total) == (True, 32.0)
    saved = np.random.default_rng(2).standard_normal(40)
    region, worth = patterns.best_run(saved, 4)
    sums = [saved[i:j].sum() for i in range(40) for j in range(i, 41)]
    assert_allclose([worth + region.bits, saved[region.columns].sum()], max(sums))


def test_a_common_vector_is_seen_beside_rows_that_moved_by_themselves_and_not_in_noise():
    random = np.random.default_rng(0)
    vector = random.standard_normal(128)
    change = np.tile(vector, (16, 1))
    change[3] += 5.0 * random.standard_normal(128)
    assert_allclose(patterns.common_vector(change, np.full(16, 1e-9)), vector, atol=1e-12)
    for rows in (3, 8, 64):
        assert not patterns.common_vector(random.standard_normal((rows, 128)), np.zeros(rows)).any()
    # rows that did not move show that nothing is common to all
    change = random.standard_normal((16, 128)) + 0.2
    change[[2, 9]] = 0.0
    assert not patterns.common_vector(change, np.full(16, 1e-9)).any()


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_the_rank_of_an_update_is_seen_under_noise_which_has_none(rank):
    random = np.random.default_rng(rank)
    update = random.standard_normal((32, rank)) @ random.standard_normal((rank, 200))
    noise = 1e-3 * random.standard_normal(update.shape)
    part = patterns.low_rank_part(update + noise, float(np.linalg.norm(noise)), 8)
    assert part is not None
    assert part.rank == rank
    assert_allclose(part.change, update, atol=0.02)
    assert patterns.low_rank_part(1e3 * noise, 1e-9, 8) is None
