"""Oracles: simulation, and NumPy's own spacing."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.switch_prediction import spacing, switch_prediction, tie_probability


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


def test_noise_crosses_one_wall_as_often_as_is_said() -> None:
    noise = 0.2 * np.random.default_rng(1).standard_normal(200_000)
    one = np.ones(1)
    found = switch_prediction(0.3 * one, 0.2 * one, 0.3 * one, 0.0 * one)[0]
    assert abs((noise > 0.3).mean() - found) < 2e-3
    assert switch_prediction(0.3 * one, 0.0 * one, 0.3 * one, 0.0 * one)[0] == 0.0
