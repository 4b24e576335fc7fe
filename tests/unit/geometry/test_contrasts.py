"""Numbers that are known up to one of each token: what they say, and in how many bits."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.contrasts import FINEST, contrast_bits, contrasts


def test_a_number_that_is_common_to_a_token_says_nothing():
    random = np.random.default_rng(0)
    told, predicted = random.standard_normal((2, 50, 4))
    common = random.standard_normal((50, 1))
    found = contrasts(told + common, predicted)
    np.testing.assert_allclose(found, contrasts(told, predicted), atol=1e-12)
    np.testing.assert_allclose(found.sum(axis=1), 0.0, atol=1e-12)


@pytest.mark.parametrize("scale", [FINEST, 0.25])
def test_bits_of_a_pair_one_scale_apart_are_those_of_the_formula(scale):
    apart = np.array([[scale, -scale], [0.0, 0.0]])
    wide = np.log2(scale / FINEST)
    np.testing.assert_allclose(contrast_bits(apart, scale), [wide + 1.0, wide])


def test_what_is_not_known_costs_nothing_and_nothing_costs_less():
    told = np.array([[0.0, np.nan, 1.0], [np.inf, 0.0, 0.0], [1.0, 2.0, 4.0]])
    bits = contrast_bits(contrasts(told, np.zeros((3, 3))), 0.5)
    np.testing.assert_array_equal(bits[:2], 0.0)
    assert bits[2] > 0.0


def test_the_scale_of_noise_is_that_which_takes_the_fewest_bits():
    random = np.random.default_rng(1)
    apart = contrasts(0.05 * random.standard_cauchy((4000, 8)), np.zeros((4000, 8)))
    scales = 0.05 * 4.0 ** np.arange(-3, 4)
    bits = [contrast_bits(apart, scale).sum() for scale in scales]
    assert abs(int(np.argmin(bits)) - 3) <= 1
