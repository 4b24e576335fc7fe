"""Oracle: cells and losses of mixtures by loops over all channels and all permutations, and fits
and their least standard deviations by scipy.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import curve_fit, least_squares
from scipy.spatial.distance import cdist

from moegeom.geometry.hmoe.descent import descended
from moegeom.geometry.hmoe.identifiability import cramer_rao_sd
from moegeom.geometry.hmoe.losses import loss_1, loss_2, voronoi_cells
from moegeom.geometry.hmoe.mixture import Mixture, centred, published_truth, with_channels
from moegeom.geometry.hmoe.regression import channel_functions, jacobian, regression
from moegeom.kernels.cpu.mixture import mean_square

INPUTS = np.random.default_rng(1).uniform(-1.0, 1.0, (300, 2))


def random_mixture(seed: int, channels: int, experts: int = 3) -> Mixture:
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=(2, experts, 2, 2))
    return Mixture(
        generator.uniform(0.1, 1.0, (2, channels)),
        scores + scores.transpose(0, 1, 3, 2),
        generator.normal(size=(2, experts, channels, 2)),
    )


def by_hand(fitted: Mixture, true: Mixture, position: str, power) -> float:
    """From the definition: ``power`` of a cell's number of members."""
    fitted, true = centred(fitted), centred(true)
    found = channel_functions(fitted, INPUTS, position).reshape(len(INPUTS), -1)
    wanted = channel_functions(true, INPUTS, position).reshape(len(INPUTS), -1)
    cell = cdist(found.T, wanted.T, "sqeuclidean").argmin(axis=1)
    columns, own = true.num_channels, fitted.num_channels
    total = 0.0
    for number in range(wanted.shape[1]):
        h, k = divmod(number, columns)
        members = [divmod(int(m), own) for m in np.flatnonzero(cell == number)]
        total += abs(sum(fitted.weights[at] for at in members) - true.weights[h, k])
        for head, channel in members:
            pairs = []
            for order in itertools.permutations(range(len(true.scores[0]))):
                score = [
                    np.linalg.norm(fitted.scores[head, j] - true.scores[h, i])
                    for i, j in enumerate(order)
                ]
                expert = [
                    np.linalg.norm(fitted.experts[head, j, channel] - true.experts[h, i, k])
                    for i, j in enumerate(order)
                ]
                parts = np.array(score + expert)
                pairs.append(((parts**2).sum(), (parts ** power(len(members))).sum()))
            total += fitted.weights[head, channel] * min(pairs)[1]
    return float(total)


@pytest.mark.parametrize("position", ["none", "value", "sdpa"])
@pytest.mark.parametrize("seed", range(4))
def test_losses_are_those_of_every_channel_and_permutation(position, seed):
    fitted, true = random_mixture(seed, 3), random_mixture(seed + 100, 2)
    for r in (1.0, 2.0, 3.0):
        found = loss_1(fitted, true, INPUTS, r, position)
        np.testing.assert_allclose(found, by_hand(fitted, true, position, lambda _, r=r: r))
    expected = by_hand(fitted, true, position, lambda members: 1.0 if members == 1 else 2.0)
    np.testing.assert_allclose(loss_2(fitted, true, INPUTS, position), expected)


def test_equal_functions_go_to_the_channel_with_the_lower_number():
    values = np.ones((5, 2, 2))
    np.testing.assert_array_equal(voronoi_cells(values, values), np.zeros((2, 2)))


@pytest.mark.parametrize("position", ["none", "value", "sdpa"])
def test_the_same_function_in_another_order_and_gauge_has_no_loss(position):
    true = random_mixture(7, 2)
    order, gauge = [2, 0, 1], np.array([[1.0, 0.3], [0.3, -2.0]])
    same = Mixture(
        true.weights[::-1, ::-1],
        true.scores[::-1][:, order] + gauge,
        true.experts[::-1][:, order][:, :, ::-1],
    )
    expected = regression(true, INPUTS, position)
    np.testing.assert_allclose(regression(same, INPUTS, position), expected, atol=1e-12)
    assert loss_2(same, true, INPUTS, position) < 1e-12
    raw = np.linalg.norm(same.scores[::-1][:, np.argsort(order)] - true.scores)
    assert raw > 1.0, "without the gauge it would count"


def test_an_empty_cell_costs_its_weight():
    true = with_channels(published_truth(), 2)
    lost = Mixture(true.weights[:, :1], true.scores, true.experts[:, :, :1])
    np.testing.assert_allclose(loss_2(lost, true, INPUTS, "value"), 0.5 + 0.3)


# ---------------------------------------------------------------------------------------- estimates
def free(mixture: Mixture) -> np.ndarray:
    """Parameters as one vector: weights, upper triangles with the last score held, experts."""
    rows, columns = np.triu_indices(2)
    upper = mixture.scores[:, :-1, rows, columns]
    return np.concatenate([mixture.weights.ravel(), upper.ravel(), mixture.experts.ravel()])


def filled(vector: np.ndarray, like: Mixture) -> Mixture:
    heads, experts, channels, dims = like.experts.shape
    weights, upper, rest = np.split(
        vector, np.cumsum([heads * channels, heads * (experts - 1) * 3])
    )
    rows, columns = np.triu_indices(dims)
    scores = like.scores.copy()
    for r, c in ((rows, columns), (columns, rows)):
        scores[:, :-1, r, c] = upper.reshape(heads, experts - 1, 3)
    return Mixture(weights.reshape(heads, channels), scores, rest.reshape(like.experts.shape))


def small_truth() -> Mixture:
    """One head, so that its parameters can be estimated at all."""
    return Mixture(
        np.array([[1.0]]),
        np.array([[[[2.0, 0.5], [0.5, -1.0]], [[0.0, 0.0], [0.0, 0.0]]]]),
        np.array([[[[3.0, -1.0]], [[-2.0, 2.0]]]]),
    )


def test_least_deviations_are_those_of_curve_fit():
    truth = small_truth()
    generator = np.random.default_rng(0)
    inputs = generator.uniform(-1.0, 1.0, (1000, 2))
    noise = 1e-4
    targets = regression(truth, inputs, "value") + noise * generator.normal(size=len(inputs))
    _, covariance = curve_fit(
        lambda x, *vector: regression(filled(np.array(vector), truth), x, "value"),
        inputs,
        targets,
        p0=free(truth),
        sigma=np.full(len(inputs), noise),
        absolute_sigma=True,
    )
    kept = np.ones(11, dtype=bool)
    kept[4:7] = False
    derivatives = jacobian(truth, inputs, "value")[:, kept]
    found = cramer_rao_sd(derivatives, noise, len(inputs), flat=0)
    np.testing.assert_allclose(found, np.sqrt(np.diag(covariance)), rtol=0.02)
    assert (cramer_rao_sd(jacobian(truth, inputs, "value"), noise, 1000, flat=3) > 0.0).all()


@pytest.mark.parametrize("position", ["none", "value", "sdpa"])
def test_descent_ends_where_scipy_ends(position):
    truth = small_truth()
    generator = np.random.default_rng(4)
    inputs = generator.uniform(-1.0, 1.0, (200, 2))
    targets = regression(truth, inputs, position) + 0.01 * generator.normal(size=200)
    start = filled(free(truth) + 0.02, truth)
    fit = descended(start, mean_square(inputs, targets, position), epochs=400, trial=1.0)

    def residual(vector: np.ndarray) -> np.ndarray:
        return regression(filled(vector, truth), inputs, position) - targets

    best = 2.0 * least_squares(residual, free(start)).cost / len(targets)
    np.testing.assert_allclose(fit.loss, best, rtol=0.02)
    assert fit.loss < 0.9 * np.mean(residual(free(start)) ** 2)


def test_descent_says_when_steps_ran_out_and_when_nothing_is_lower():
    truth = small_truth()
    targets = regression(truth, INPUTS, "value")
    assert descended(truth, mean_square(INPUTS, targets, "value")).settled
    start = filled(free(truth) + 0.1, truth)
    fit = descended(start, mean_square(INPUTS, targets, "value"), epochs=5)
    assert (fit.epochs, fit.settled) == (5, False)
