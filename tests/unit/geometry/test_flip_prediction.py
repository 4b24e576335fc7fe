"""Oracles: simulation, and NumPy's own spacing."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.noise import flip_prediction, nearest_flip, spacing, tie_probability


def test_spacing_is_that_of_the_format() -> None:
    values = np.float32([1.0, 1.5, 2.0, -3.0, 1e-3, 65_000.0])
    np.testing.assert_array_equal(
        spacing(values.astype("f8"), 2.0**-24), np.abs(np.spacing(values))
    )
    assert spacing(np.zeros(1), 2.0**-8)[0] == 0.0


@pytest.mark.parametrize("margin", [0.0, 0.3, 0.9, 1.0, 2.0])
def test_numbers_anywhere_tie_as_often_as_is_said(margin: float) -> None:
    low = np.random.default_rng(0).uniform(0.0, 100.0, 200_000)
    tied = (np.rint(low) == np.rint(low + margin)).mean()
    found = tie_probability(np.array([margin]), np.ones(1))[0]
    assert abs(tied - found) < 5e-3


@pytest.mark.parametrize(
    ("gap", "deviation", "step"),
    [
        (0.3, 0.2, 0.0),
        (0.3, 0.2, 0.5),
        (0.0, 0.1, 1.0),
        (0.9, 0.3, 1.0),
        (0.2, 0.0, 1.0),
        (0.2, 0.5, 0.001),
    ],
)
def test_noise_and_rounding_turn_a_gap_as_often_as_is_said(
    gap: float, deviation: float, step: float
) -> None:
    random, draws = np.random.default_rng(1), 400_000
    noisy = gap + deviation * random.standard_normal(draws)
    low = random.uniform(0.0, 100.0, draws)
    after = noisy if step == 0.0 else np.rint((low + noisy) / step) - np.rint(low / step)
    expected = (after < 0.0).mean() + 0.5 * (after == 0.0).mean()
    one = np.ones(1)
    found = flip_prediction(gap * one, deviation * one, step * one)[0]
    assert abs(found - expected) < 3e-3


def test_nothing_that_moves_turns_nothing() -> None:
    assert flip_prediction(np.array([0.3]), np.zeros(1), np.zeros(1))[0] == 0.0


@pytest.mark.parametrize(("experts", "k", "scale"), [(2, 1, 0.1), (16, 4, 0.3), (64, 8, 0.03)])
def test_few_experts_stand_for_all(experts: int, k: int, scale: float) -> None:
    random = np.random.default_rng(2)
    logits = random.standard_normal((500, experts))
    deviation = scale * np.exp(0.3 * random.standard_normal((500, experts)))
    chosen = np.argsort(-logits, axis=1)[:, :k].astype(np.int32)
    flipped = [
        (np.sort(np.argsort(-noisy, axis=1)[:, :k], axis=1) != np.sort(chosen, axis=1)).any(axis=1)
        for noisy in logits + deviation * random.standard_normal((200, 500, experts))
    ]
    found = nearest_flip(logits, chosen, deviation).mean()
    np.testing.assert_allclose(found, np.mean(flipped), rtol=0.06)
