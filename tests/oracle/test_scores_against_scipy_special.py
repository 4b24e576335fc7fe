"""Oracle: scipy.special for softmax and sigmoid, numpy.logaddexp for softplus."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special

from moegeom.geometry.selection import SCORES

ORACLES = {
    "identity": lambda z: z,
    "softmax": lambda z: scipy.special.softmax(z, axis=1),
    "sigmoid": scipy.special.expit,
    "sqrt_softplus": lambda z: np.sqrt(np.logaddexp(0.0, z)),
}


def test_every_score_has_an_oracle():
    assert sorted(ORACLES) == sorted(SCORES)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 700.0, 1e4])
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_the_oracles(name, scale):
    z = np.random.default_rng(0).standard_normal((200, 17)) * scale
    np.testing.assert_allclose(SCORES[name](z), ORACLES[name](z), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("name", SCORES)
def test_float32_logits_are_scored_in_float64(name):
    z = np.random.default_rng(0).standard_normal((50, 9)).astype(np.float32)
    found = SCORES[name](z)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, ORACLES[name](z.astype(np.float64)), rtol=1e-13)


def test_sigmoid_tells_scores_apart_where_float32_saturates():
    """Spaced by 1, so that the float64 scores at z = 20 still differ by thousands of ulps."""
    found = SCORES["sigmoid"](np.array([[20.0, 21.0]]))
    np.testing.assert_allclose(
        np.diff(found), [[scipy.special.expit(-20) - scipy.special.expit(-21)]], rtol=1e-6
    )
