"""Oracle: scikit-learn's principal components, linear regression and R^2; sums token by token."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.pipeline import make_pipeline

from moegeom.geometry.space import (
    affine_r2,
    affine_residual,
    energy_share,
    mean_direction_cosine,
    mean_energy_share,
    residual_r2,
)

TOKENS, HIDDEN, WIDTH = 300, 40, 12


def layer(seed=0):
    """Inputs with a decaying spectrum, an output affine in them, and one that is not."""
    random = np.random.default_rng(seed)
    inputs = random.standard_normal((TOKENS, HIDDEN)) * 0.7 ** np.arange(HIDDEN) + 0.4
    affine = inputs @ random.standard_normal((HIDDEN, WIDTH)) + random.standard_normal(WIDTH)
    bent = np.tanh(3.0 * inputs @ random.standard_normal((HIDDEN, WIDTH)))
    return inputs, affine, bent, random.random(TOKENS) < 0.75


def fitted(inputs, train):
    rank = min((train.sum() - 1) // 10, inputs.shape[1])
    model = make_pipeline(PCA(int(rank), svd_solver="full"), LinearRegression())
    return lambda outputs: model.fit(inputs[train], outputs[train]).predict(inputs[~train])


@pytest.mark.parametrize("seed", range(4))
def test_residuals_are_those_of_principal_component_regression(seed):
    inputs, affine, bent, train = layer(seed)
    predict = fitted(inputs, train)
    for outputs in (affine, bent, affine + bent):
        expected = outputs[~train] - predict(outputs)
        np.testing.assert_allclose(
            affine_residual(inputs, outputs, train), expected, rtol=1e-8, atol=1e-9
        )


@pytest.mark.parametrize("seed", range(4))
def test_r2_is_scikit_learns_up_to_the_mean_it_is_measured_from(seed):
    inputs, affine, bent, train = layer(seed)
    outputs = affine + bent
    wrong = outputs[~train] - fitted(inputs, train)(outputs)
    spread = outputs[~train] - outputs[train].mean(axis=0)
    expected = 1.0 - (wrong**2).sum() / (spread**2).sum()
    found = affine_r2(inputs, outputs, train)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    theirs = r2_score(
        outputs[~train], outputs[~train] - wrong, multioutput="variance_weighted"
    )  # from the mean of the test tokens, hence no larger
    assert theirs <= found <= theirs + 0.05


def test_an_affine_output_of_few_directions_is_explained_and_noise_is_not():
    inputs, _, _, train = layer()
    random = np.random.default_rng(1)
    flat = inputs[:, :3] @ random.standard_normal((3, 40))  # three directions, 22 components
    outputs = 2.0 + flat @ random.standard_normal((40, WIDTH))
    np.testing.assert_allclose(affine_r2(flat, outputs, train), 1.0, rtol=1e-12)
    found = affine_r2(inputs, random.standard_normal((TOKENS, WIDTH)), train)
    assert -0.3 < found < 0.0  # 22 of 225 degrees of freedom follow the noise


@pytest.mark.parametrize("seed", range(4))
def test_residuals_of_parts_add_up(seed):
    inputs, affine, bent, train = layer(seed)
    total = affine_residual(inputs, affine + bent, train)
    parts = affine_residual(inputs, affine, train) + affine_residual(inputs, bent, train)
    np.testing.assert_allclose(total, parts, rtol=0, atol=1e-12 * np.abs(total).max())


def test_what_is_not_affine_belongs_to_the_part_that_bends():
    inputs, _, bent, train = layer()
    few = PCA(5, svd_solver="full").fit(inputs[train])  # inside the components of the fit
    affine = few.transform(inputs) @ np.ones((5, WIDTH)) + 1.0
    whole = affine + bent
    np.testing.assert_allclose(residual_r2(inputs, bent, whole, train), 1.0, atol=1e-12)
    np.testing.assert_allclose(residual_r2(inputs, affine, whole, train), 0.0, atol=1e-9)
    assert residual_r2(inputs, 3.0 * bent, whole, train) < -2.0
    np.testing.assert_allclose(residual_r2(inputs, whole, whole, train), 1.0, rtol=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_residual_r2_is_scikit_learns_from_zero(seed):
    inputs, affine, bent, train = layer(seed)
    whole, predict = affine + bent, fitted(inputs, train)
    left = whole[~train] - predict(whole)
    of_part = bent[~train] - predict(bent)
    expected = 1.0 - ((left - of_part) ** 2).sum() / (left**2).sum()
    np.testing.assert_allclose(residual_r2(inputs, bent, whole, train), expected, rtol=1e-8)


def test_r2_does_not_depend_on_turning_shifting_or_scaling_either_side():
    inputs, affine, bent, train = layer()
    outputs = affine + bent
    turn = np.linalg.qr(np.random.default_rng(2).standard_normal((HIDDEN, HIDDEN)))[0]
    other = np.linalg.qr(np.random.default_rng(3).standard_normal((WIDTH, WIDTH)))[0]
    found = affine_r2(7.0 * inputs @ turn + 3.0, 0.1 * outputs @ other - 2.0, train)
    np.testing.assert_allclose(found, affine_r2(inputs, outputs, train), rtol=1e-9)


def test_too_few_tokens_have_no_fit():
    inputs, affine, bent, _ = layer()
    for kept in (0, 19, TOKENS):
        train = np.arange(TOKENS) < kept
        assert np.isnan(affine_r2(inputs, affine, train))
        assert np.isnan(residual_r2(inputs, affine, affine + bent, train))
    train = np.arange(TOKENS) < 20
    assert np.isfinite(affine_r2(inputs, affine, train))
    assert affine_residual(inputs, affine, train).shape == (TOKENS - 20, WIDTH)
    assert np.isnan(affine_residual(inputs, affine, np.arange(TOKENS) < 19)).all()


def test_constant_outputs_have_no_r2():
    inputs, _, _, train = layer()
    constant = np.full((TOKENS, WIDTH), 0.1)
    assert np.isnan(affine_r2(inputs, constant, train))
    assert np.isnan(residual_r2(inputs, constant, constant, train))
    assert np.isnan(affine_r2(inputs, 0.0 * constant, train))


def test_energy_shares_token_by_token():
    _, affine, bent, _ = layer()
    whole = affine + bent
    lengths = [sum(float(x) ** 2 for x in row) for row in whole]
    parts = [sum(float(x) ** 2 for x in row) for row in bent]
    np.testing.assert_allclose(energy_share(bent, whole), np.mean(parts) / np.mean(lengths), 1e-12)
    mean = [float(np.mean(column)) for column in whole.T]
    expected = sum(x * x for x in mean) / np.mean(lengths)
    np.testing.assert_allclose(mean_energy_share(whole), expected, rtol=1e-12)


def test_the_mean_direction_is_scikit_learns_cosine():
    _, affine, bent, _ = layer()
    expected = cosine_similarity(bent.mean(axis=0)[None], affine.mean(axis=0)[None])
    np.testing.assert_allclose(mean_direction_cosine(bent, affine), expected[0, 0], rtol=1e-12)


def test_shares_at_the_corners():
    some, none = np.ones((5, 3)), np.zeros((5, 3))
    np.testing.assert_equal(mean_energy_share(some), 1.0)
    np.testing.assert_equal(mean_energy_share(np.array([[1.0, 2.0], [-1.0, -2.0]])), 0.0)
    np.testing.assert_equal(energy_share(2.0 * some, some), 4.0)
    for nothing in (none, np.zeros((0, 3))):
        assert np.isnan(mean_energy_share(nothing))
        assert np.isnan(energy_share(nothing, nothing))
    assert np.isnan(mean_direction_cosine(some, none))


def test_independent_outputs_share_one_over_the_number_of_tokens():
    drawn = [np.random.default_rng(s).standard_normal((50, 30)) for s in range(200)]
    found = [mean_energy_share(values) for values in drawn]
    np.testing.assert_allclose(np.mean(found), 1 / 50, rtol=0.03)
