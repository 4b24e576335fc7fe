"""Ranks modulo a prime against exact arithmetic and numpy."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from moegeom.studies.cells.exact.rank import independent_columns, independent_columns_of


@pytest.mark.parametrize("seed", range(6))
def test_columns_of_float_rows_are_those_of_fractions(seed):
    generator = np.random.default_rng(seed)
    weight = generator.integers(-2, 3, (6, 8)) * 2.0 ** generator.integers(-30, 30, (6, 8))
    weight[3] = weight[2]
    weight[:, 2] = weight[:, 0]
    exact = independent_columns([[Fraction(value) for value in row] for row in weight.tolist()])
    assert independent_columns_of(weight) == exact


def test_rank_of_a_whole_router_is_one_less_than_its_experts():
    weight = np.random.default_rng(0).standard_normal((64, 2048)).astype(np.float32)
    assert independent_columns_of(weight.astype(np.float64)) == list(range(63))


def test_equal_rows_of_a_whole_router_are_told():
    weight = np.random.default_rng(0).standard_normal((64, 2048))
    weight[7] = weight[3]
    with pytest.raises(ValueError, match="rank 62 modulo a prime, below the 63"):
        independent_columns_of(weight)


def test_one_row_has_no_differences():
    assert independent_columns_of(np.ones((1, 3))) == []
