"""Oracle: scipy's logistic chances, in logarithms of float64 numbers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_expit

from moegeom.geometry.set_code import set_distances
from moegeom.studies.faults._bits import STEP, bits_by_chance

#: Share of sets that have nothing to do with their scores.
EPSILON = 2.0**-10


@pytest.mark.parametrize(("experts", "k"), [(5, 2), (64, 8), (384, 6), (256, 96), (16, 16)])
def test_bits_are_those_of_independent_logistic_choices_or_of_any_set(experts: int, k: int) -> None:
    random = np.random.default_rng(experts)
    scores = random.standard_normal((50, experts))
    noise = np.geomspace(1e-3, 1.0, len(scores))[:, None] * random.standard_normal(scores.shape)
    chosen = np.argsort(-(scores + noise))[:, :k]
    scores[0, :2], scores[1, chosen[1, 0]] = -np.inf, np.nan
    sets = set_distances(scores, chosen)
    for step, found in enumerate(bits_by_chance(sets, 4.0, 5)):
        scaled = np.clip(sets.wrong.astype(np.float64) * STEP**step / 4.0, -60.0, 60.0)
        own = log_expit(-scaled).sum(axis=1) / np.log(2.0)
        expected = -np.logaddexp2(own + np.log2(1.0 - EPSILON), -10.0 - sets.outright)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_sets_of_very_many_experts_are_no_dearer_than_their_names() -> None:
    scores = np.random.default_rng(0).standard_normal((6, 1200))
    chosen = np.argsort(-scores)[:, :600]
    chosen[3:] = np.argsort(scores[3:])[:, :600]
    sets = set_distances(scores, chosen)
    (found,) = bits_by_chance(sets, 1e-3 * sets.spacing, 1)
    assert found[:3].max() < 0.1
    np.testing.assert_allclose(found[3:], 10.0 + sets.outright)
