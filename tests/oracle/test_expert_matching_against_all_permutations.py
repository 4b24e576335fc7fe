"""Other numbers of experts, against all permutations of six."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moegeom.geometry.rows import common_choices, expert_matching


@pytest.mark.parametrize("seed", range(20))
def test_no_numbering_fits_better(seed):
    counts = np.random.default_rng(seed).integers(0, 5, (6, 6))
    own = np.arange(6)

    def fit(order: tuple[int, ...]) -> tuple[int, int]:
        return int(counts[own, list(order)].sum()), int((own == order).sum())

    found = expert_matching(counts)
    assert fit(tuple(found)) == max(map(fit, itertools.permutations(range(6))))


def test_counts_are_those_of_tokens_with_both_experts():
    one, other = np.array([[0, 1], [1, 2], [0, 2]]), np.array([[2, 1], [0, 1], [0, 2]])
    counts = common_choices(one, other, 3)
    for a, b in itertools.product(range(3), repeat=2):
        expected = sum(a in mine and b in theirs for mine, theirs in zip(one, other, strict=True))
        assert counts[a, b] == expected


def test_renamed_choices_are_named_back():
    generator = np.random.default_rng(3)
    mine = np.argsort(generator.random((500, 16)), axis=1)[:, :4]
    numbers = generator.permutation(16)
    assert (expert_matching(common_choices(mine, numbers[mine], 16)) == numbers).all()
