"""Bits of a set are those of the model in the docstring, computed once more."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import comb, expit

from moegeom.geometry.set_code import boundary, chosen_mask, log2_sets, set_distances

EPSILON = 2.0**-10


def drawn(seed: int, experts: int = 7, k: int = 3, noise: float = 0.3):
    random = np.random.default_rng(seed)
    scores = random.standard_normal((40, experts)).astype(np.float32)
    moved = scores + noise * random.standard_normal(scores.shape)
    return scores, np.argsort(-moved, axis=1)[:, :k]


@pytest.mark.parametrize("temperature", [0.01, 0.2, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_bits_are_those_of_independent_logistic_choices_or_of_any_set(seed, temperature):
    scores, chosen = drawn(seed)
    found = set_distances(scores, chosen).bits(temperature)
    for row, experts in enumerate(chosen):
        ranked = np.sort(scores[row].astype(float))[::-1]
        middle = 0.5 * (ranked[2] + ranked[3])
        chance = expit((scores[row] - middle) / temperature)
        own = np.prod([chance[e] if e in experts else 1.0 - chance[e] for e in range(7)])
        expected = -np.log2((1.0 - EPSILON) * own + EPSILON / comb(7, 3))
        np.testing.assert_allclose(found[row], expected, rtol=1e-3, atol=1e-4)


def test_what_is_predicted_costs_nothing_and_nothing_costs_more_than_its_name():
    scores, chosen = drawn(0, noise=0.0)
    found = set_distances(scores, chosen)
    assert found.is_met.all()
    assert found.bits(1e-6).max() < 0.002
    worst = np.argsort(scores, axis=1)[:, :3]
    assert set_distances(scores, worst).bits(1e-4).max() <= 10.0 + log2_sets(7, 3) + 1e-6


def test_ties_cost_nothing_once_the_way_to_break_them_is_said():
    scores = np.round(drawn(1, experts=12, k=4)[0])
    first = np.argsort(-scores, axis=1, kind="stable")[:, :4]
    last = 11 - np.argsort(-scores[:, ::-1], axis=1, kind="stable")[:, :4]
    for chosen, way, other in ((first, "lowest", "highest"), (last, "highest", "lowest")):
        found = set_distances(scores, chosen)
        assert found.is_met.all()
        assert found.bits(1e-3, way).max() < 0.2
        assert found.bits(1e-3, other).sum() > found.bits(1e-3).sum() > found.bits(1e-3, way).sum()


def test_nan_predicts_nothing_and_minus_infinity_is_never_chosen():
    scores, chosen = drawn(2)
    scores[0] = np.nan
    scores[1, chosen[1, 0]] = -np.inf
    bits = set_distances(scores, chosen).bits(0.1)
    np.testing.assert_allclose(bits[:2], 10.0 + log2_sets(7, 3), rtol=1e-3)
    whole = set_distances(scores, np.tile(np.arange(7), (40, 1)))
    assert whole.bits(0.1).max() < 1e-9


def test_the_boundary_lies_between_the_last_chosen_score_and_the_next():
    scores, _ = drawn(3)
    ranked = np.sort(scores, axis=1)[:, ::-1]
    middle, spacing = boundary(scores, 3)
    np.testing.assert_allclose(middle, 0.5 * (ranked[:, 2] + ranked[:, 3]), rtol=1e-5)
    np.testing.assert_allclose(spacing, np.median(ranked[:, 2] - ranked[:, 3]), rtol=1e-5)
    masked = np.where(np.arange(7) < 3, scores, -np.inf)
    np.testing.assert_array_equal(boundary(masked, 3)[0], masked[:, :3].min(axis=1))
    mask = chosen_mask(np.array([[0, 2]]), 4)
    np.testing.assert_array_equal(mask, [[True, False, True, False]])
