"""What a pattern saves is what it takes away, less its numbers; nothing is saved by chance."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.description import (
    best_rows,
    best_run,
    common_vector,
    low_rank_part,
    number_bits,
    row_bits,
)


def test_halving_a_row_saves_a_bit_for_each_of_its_numbers():
    found = row_bits(np.array([2.0, 2.0, 1.0]), np.array([1.0, 0.1, 1.0]), np.array([0.5] * 3), 8)
    np.testing.assert_allclose(found, [8.0, 16.0, 0.0])


def test_rows_within_rounding_save_nothing():
    tiny = np.full(3, 1e-9)
    np.testing.assert_array_equal(row_bits(tiny, 0.0 * tiny, np.ones(3), 8), 0.0)


def test_a_number_that_explains_more_costs_more():
    np.testing.assert_allclose(number_bits(3, 256, 4.0, 1.0), 3 * (4.0 + 2.0))
    np.testing.assert_allclose(number_bits(3, 256, 1.0, 1.0), 12.0)


@pytest.mark.parametrize("rows", [3, 8, 64])
def test_noise_has_no_common_vector(rows):
    noise = np.random.default_rng(rows).standard_normal((rows, 128))
    np.testing.assert_array_equal(common_vector(noise, np.zeros(rows)), 0.0)


def test_a_common_vector_is_found_beside_rows_that_moved_by_themselves():
    random = np.random.default_rng(0)
    vector = random.standard_normal(128)
    change = np.tile(vector, (16, 1))
    change[3] += 5.0 * random.standard_normal(128)
    np.testing.assert_allclose(common_vector(change, np.full(16, 1e-9)), vector, atol=1e-12)


def test_rows_that_did_not_move_show_that_nothing_is_common_to_all():
    change = np.random.default_rng(1).standard_normal((16, 128)) + 0.2
    change[[2, 9]] = 0.0
    np.testing.assert_array_equal(common_vector(change, np.full(16, 1e-9)), 0.0)


def test_the_rows_that_save_are_named_where_that_costs_less():
    saved = np.where(np.arange(32) < 5, 100.0, -10.0)
    region, worth = best_rows(saved, 8)
    np.testing.assert_array_equal(np.flatnonzero(region.rows), np.arange(5))
    assert 0.0 < region.bits < 100.0
    np.testing.assert_allclose(worth, 500.0 - region.bits)
    every, total = best_rows(np.ones(32), 8)
    assert (every.is_whole, total) == (True, 32.0)


def test_the_best_run_of_columns_is_the_one_with_the_largest_sum():
    saved = np.random.default_rng(2).standard_normal(40)
    region, worth = best_run(saved, 4)
    sums = [saved[i:j].sum() for i in range(40) for j in range(i, 41)]
    np.testing.assert_allclose(worth + region.bits, max(sums))
    np.testing.assert_allclose(saved[region.columns].sum(), max(sums))


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_the_rank_of_an_update_is_found_under_noise(rank):
    random = np.random.default_rng(rank)
    update = random.standard_normal((32, rank)) @ random.standard_normal((rank, 200))
    noise = 1e-3 * random.standard_normal(update.shape)
    found = low_rank_part(update + noise, float(np.linalg.norm(noise)), 8)
    assert found is not None
    assert found.rank == rank
    np.testing.assert_allclose(found.change, update, atol=0.02)


def test_noise_has_no_part_of_low_rank():
    noise = np.random.default_rng(5).standard_normal((32, 200))
    assert low_rank_part(noise, 1e-9, 8) is None
