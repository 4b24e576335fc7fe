"""Oracle: torch in float64, scipy.special, scipy.stats; mpmath where float64 runs out."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import scipy.special
import scipy.stats

from moegeom.geometry.load import entropy_nats, log_sum_exp, normalised_scores
from moegeom.geometry.selection import SCORES

torch = pytest.importorskip("torch")

THEIRS = {
    "identity": lambda z: torch.softmax(z, dim=1),
    "softmax": lambda z: torch.softmax(z, dim=1),
    "sigmoid": lambda z: torch.nn.functional.normalize(torch.sigmoid(z), p=1, dim=1),
    "sqrt_softplus": lambda z: torch.nn.functional.normalize(
        torch.nn.functional.softplus(z, threshold=1e9).sqrt(), p=1, dim=1
    ),
}


def logits(scale, seed=0, tokens=200, experts=17):
    return np.random.default_rng(seed).standard_normal((tokens, experts)) * scale


def test_every_score_has_an_oracle():
    assert sorted(THEIRS) == sorted(SCORES)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("score", THEIRS)
def test_normalised_scores_are_torchs(score, scale):
    z = logits(scale)
    found = normalised_scores(z, score)
    expected = THEIRS[score](torch.from_numpy(z)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-300)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-13)


@pytest.mark.parametrize("score", THEIRS)
def test_normalised_scores_of_float32_are_computed_in_float64(score):
    z = logits(3.0).astype(np.float32)
    np.testing.assert_array_equal(
        normalised_scores(z, score), normalised_scores(z.astype(np.float64), score)
    )


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("level", [-2000.0, -800.0, -31.0, -30.0, -29.0, -5.0, 0.0, 40.0, 2000.0])
def test_scores_that_underflow_keep_their_ratio(score, level):
    z = [level, level + 1.0, level - 2.5]
    function = {
        "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
        "sqrt_softplus": lambda x: mpmath.sqrt(mpmath.log1p(mpmath.exp(x))),
    }[score]
    with mpmath.workdps(60):
        scores = [function(mpmath.mpf(x)) for x in z]
        expected = [float(s / mpmath.fsum(scores)) for s in scores]
    np.testing.assert_allclose(normalised_scores(np.array([z]), score)[0], expected, rtol=1e-12)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 30.0, 700.0])
def test_entropy_is_scipys_and_torchs(scale):
    p = normalised_scores(logits(scale), "softmax")
    found = entropy_nats(p)
    np.testing.assert_allclose(found, scipy.stats.entropy(p, axis=1), rtol=1e-12, atol=1e-13)
    theirs = torch.special.entr(torch.from_numpy(p)).sum(dim=1).numpy()
    np.testing.assert_allclose(found, theirs, rtol=1e-12, atol=1e-13)
    assert found.min() >= 0.0
    assert found.max() <= np.log(17) * (1 + 1e-15)


def test_entropy_at_the_corners():
    np.testing.assert_array_equal(entropy_nats(np.eye(4)), 0.0)
    assert not np.signbit(entropy_nats(np.eye(4))).any()
    np.testing.assert_allclose(entropy_nats(np.full((2, 8), 0.125)), np.log(8), rtol=1e-15)
    np.testing.assert_array_equal(entropy_nats(np.array([[np.nan, 1.0]])), np.nan)
    assert entropy_nats(np.zeros((0, 4))).shape == (0,)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 700.0, 1e6])
def test_log_sum_exp_is_scipys_and_torchs(scale):
    z = logits(scale)
    found = log_sum_exp(z)
    np.testing.assert_allclose(found, scipy.special.logsumexp(z, axis=1), rtol=1e-14)
    np.testing.assert_allclose(found, torch.logsumexp(torch.from_numpy(z), 1).numpy(), rtol=1e-14)


@pytest.mark.parametrize("score", ["identity", "softmax"])
def test_a_common_shift_of_the_logits_changes_no_entropy(score):
    z = logits(3.0)
    moved = entropy_nats(normalised_scores(z + 7.0, score))
    np.testing.assert_allclose(moved, entropy_nats(normalised_scores(z, score)), rtol=1e-12)
    np.testing.assert_allclose(log_sum_exp(z + 7.0), log_sum_exp(z) + 7.0, rtol=1e-14)
