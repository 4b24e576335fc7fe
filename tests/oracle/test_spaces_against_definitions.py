"""Oracles: SciPy's distances, singular values, sums token by token, worked cubes, eigenvalues of samples."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal, assert_equal
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA
from sklearn.metrics import r2_score
from sklearn.metrics.pairwise import cosine_similarity

from moegeom.geometry import space


@pytest.fixture(scope="module", params=range(3))
def drawn(request) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(request.param)
    label = rng.integers(0, 5, 200)
    rows = rng.normal(size=(5, 30))[label] * request.param + rng.normal(size=(200, 30))
    return rows * np.linspace(3.0, 1.0, 30), label


@pytest.mark.parametrize("count", [2, 7, 30])
def test_coordinates_are_those_of_the_largest_singular_values(drawn, count):
    rows, _ = drawn
    centred = rows - rows.mean(axis=0)
    left, sizes, right = np.linalg.svd(centred, full_matrices=False)
    found = space.principal_components(rows, count)
    expected = np.abs(left[:, :count] * sizes[:count])
    assert_allclose(np.abs(found.points), expected, atol=1e-8)
    assert_allclose(np.abs(found.axes), np.abs(right[:count]), atol=1e-8)
    assert_allclose(found.shares, sizes[:count] ** 2 / (sizes**2).sum(), rtol=1e-9)
    assert_allclose(centred @ found.axes.T, found.points, atol=1e-8)
    assert (found.points[np.abs(found.points).argmax(axis=0), np.arange(count)] > 0).all()


def test_neighbours_and_the_silhouette_are_those_of_all_pairs(drawn):
    rows, label = drawn
    apart = cdist(rows, rows)
    nearest = np.argsort(apart, axis=1)[:, 1:11]
    share, chance = space.neighbours_of_same_label(rows, label, 10)
    assert share == pytest.approx((label[nearest] == label[:, None]).mean())
    pairs = label[:, None] == label[None, :]
    assert chance == pytest.approx((pairs.sum() - 200) / (200 * 199))
    label = np.where(np.arange(200) == 7, 99, label)  # one alone with its label
    others = [np.delete(np.arange(200), n) for n in range(200)]
    mean = [
        {a: apart[n, o][label[o] == a].mean() for a in set(label[o])} for n, o in enumerate(others)
    ]
    inside = [m.pop(a, None) for m, a in zip(mean, label, strict=True)]
    widths = [
        0.0 if i is None else (min(m.values()) - i) / max(i, min(m.values()))
        for m, i in zip(mean, inside, strict=True)
    ]
    assert space.silhouette(rows, label) == pytest.approx(np.mean(widths), abs=1e-9)


def test_equal_points_single_labels_few_tokens_and_constant_outputs_have_no_figure():
    rows = np.ones((20, 4))
    components = space.principal_components(rows)
    assert np.isnan(components.shares).all()
    assert not components.points.any()
    label = np.zeros(20, np.int64)
    assert math.isnan(space.silhouette(rows, label))
    assert space.silhouette(random_rows(0, 20), np.arange(20)) == 0.0
    assert np.isnan(space.neighbours_of_same_label(rows[:5], label[:5], 10)).all()
    inputs, affine, bent, some = layer()
    for number in (0, 19, TOKENS):
        train = np.arange(TOKENS) < number
        assert np.isnan(space.affine_r2(inputs, affine, train))
        assert np.isnan(space.residual_r2(inputs, affine, affine + bent, train))
    train = np.arange(TOKENS) < 20
    assert np.isfinite(space.affine_r2(inputs, affine, train))
    assert space.affine_residual(inputs, affine, train).shape == (TOKENS - 20, WIDTH)
    assert np.isnan(space.affine_residual(inputs, affine, np.arange(TOKENS) < 19)).all()
    constant = np.full((TOKENS, WIDTH), 0.1)
    assert np.isnan(space.affine_r2(inputs, constant, some))
    assert np.isnan(space.residual_r2(inputs, constant, constant, some))
    assert np.isnan(space.affine_r2(inputs, 0.0 * constant, some))


# ----------------------------------------------------------------------------------------- carriers
TOKENS, HIDDEN, WIDTH = 300, 40, 12


def layer(seed=0):
    """Inputs with a decaying spectrum, an output affine in them, and one that is not."""
    random = np.random.default_rng(seed)
    inputs = random.standard_normal((TOKENS, HIDDEN)) * 0.7 ** np.arange(HIDDEN) + 0.4
    affine = inputs @ random.standard_normal((HIDDEN, WIDTH)) + random.standard_normal(WIDTH)
    bent = np.tanh(3.0 * inputs @ random.standard_normal((HIDDEN, WIDTH)))
    return inputs, affine, bent, random.random(TOKENS) < 0.75


def fitted(inputs, train):
    """Least squares on the leading singular directions of the training inputs."""
    rank = min((train.sum() - 1) // 10, inputs.shape[1])
    centre = inputs[train].mean(axis=0)
    basis = np.linalg.svd(inputs[train] - centre, full_matrices=False)[2][:rank].T
    table = np.column_stack([(inputs - centre) @ basis, np.ones(len(inputs))])
    return lambda outputs: (
        table[~train] @ np.linalg.lstsq(table[train], outputs[train], rcond=None)[0]
    )


@pytest.mark.parametrize("seed", range(4))
def test_residuals_and_r2_are_those_of_principal_component_regression_and_add_up(seed):
    inputs, affine, bent, train = layer(seed)
    predict, whole = fitted(inputs, train), affine + bent
    wrong = [outputs[~train] - predict(outputs) for outputs in (affine, bent, whole)]
    ours = [space.affine_residual(inputs, outputs, train) for outputs in (affine, bent, whole)]
    assert_allclose(ours, wrong, rtol=1e-8, atol=1e-9)
    assert_allclose(ours[2], ours[0] + ours[1], rtol=0, atol=1e-12 * np.abs(ours[2]).max())
    left = (wrong[2] ** 2).sum()
    spread = whole[~train] - whole[train].mean(axis=0)
    r2 = space.affine_r2(inputs, whole, train)
    assert_allclose(r2, 1.0 - left / (spread**2).sum(), rtol=1e-9)
    # theirs is measured from the mean of the test tokens, hence no larger
    theirs = r2_score(whole[~train], predict(whole), multioutput="variance_weighted")
    assert theirs <= r2 <= theirs + 0.05
    expected = 1.0 - ((wrong[2] - wrong[1]) ** 2).sum() / left
    assert_allclose(space.residual_r2(inputs, bent, whole, train), expected, rtol=1e-8)


def test_what_is_affine_is_explained_and_what_bends_belongs_to_its_part():
    inputs, _, _, train = layer()
    random = np.random.default_rng(1)
    flat = inputs[:, :3] @ random.standard_normal((3, 40))  # three directions, 22 components
    outputs = 2.0 + flat @ random.standard_normal((40, WIDTH))
    assert_allclose(space.affine_r2(flat, outputs, train), 1.0, rtol=1e-12)
    found = space.affine_r2(inputs, random.standard_normal((TOKENS, WIDTH)), train)
    assert -0.3 < found < 0.0  # 22 of 225 degrees of freedom follow the noise
    inputs, _, bent, train = layer()
    few = PCA(5, svd_solver="full").fit(inputs[train])  # inside the components of the fit
    affine = few.transform(inputs) @ np.ones((5, WIDTH)) + 1.0
    whole = affine + bent
    assert_allclose(space.residual_r2(inputs, bent, whole, train), 1.0, atol=1e-12)
    assert_allclose(space.residual_r2(inputs, affine, whole, train), 0.0, atol=1e-9)
    assert space.residual_r2(inputs, 3.0 * bent, whole, train) < -2.0
    assert_allclose(space.residual_r2(inputs, whole, whole, train), 1.0, rtol=1e-15)


def test_energy_shares_and_directions_are_those_of_sums_token_by_token():
    _, affine, bent, _ = layer()
    whole = affine + bent
    lengths = [sum(float(x) ** 2 for x in row) for row in whole]
    parts = [sum(float(x) ** 2 for x in row) for row in bent]
    assert_allclose(space.energy_share(bent, whole), np.mean(parts) / np.mean(lengths), 1e-12)
    mean = [float(np.mean(column)) for column in whole.T]
    expected = sum(x * x for x in mean) / np.mean(lengths)
    assert_allclose(space.mean_energy_share(whole), expected, rtol=1e-12)
    expected = cosine_similarity(bent.mean(axis=0)[None], affine.mean(axis=0)[None])
    assert_allclose(space.mean_direction_cosine(bent, affine), expected[0, 0], rtol=1e-12)
    some, none = np.ones((5, 3)), np.zeros((5, 3))
    assert_equal(space.mean_energy_share(some), 1.0)
    assert_equal(space.mean_energy_share(np.array([[1.0, 2.0], [-1.0, -2.0]])), 0.0)
    assert_equal(space.energy_share(2.0 * some, some), 4.0)
    for nothing in (none, np.zeros((0, 3))):
        assert np.isnan(space.mean_energy_share(nothing))
        assert np.isnan(space.energy_share(nothing, nothing))
    assert np.isnan(space.mean_direction_cosine(some, none))
    drawn = [np.random.default_rng(s).standard_normal((50, 30)) for s in range(200)]
    found = [space.mean_energy_share(values) for values in drawn]
    assert_allclose(np.mean(found), 1 / 50, rtol=0.03)


# --------------------------------------------------------------------------------------- dimensions
def random_rows(seed, tokens=300, dimension=12):
    return np.random.default_rng(seed).standard_normal((tokens, dimension))


CLOUDS = {
    "gaussian": random_rows(0),
    "off_centre": random_rows(2) + 1e5,
    # a few tokens of a thousand times the norm, as attention sinks have
    "outliers": random_rows(1) * np.where(np.arange(300) < 3, 1e3, 1.0)[:, None],
    # pairs a millionth of a millionth of their length apart, which products of rows do not see
    "pairs": np.repeat(random_rows(8, 100) + 1e3, 2, axis=0) + 1e-9 * random_rows(9, 200),
    "line": np.linspace(0.0, 1.0, 200)[:, None] ** 2 * np.ones((1, 3)),
    "repeated": np.repeat(random_rows(3, 40), 30, axis=0),
    "one_dimension": random_rows(4, dimension=1),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOUDS)
def test_distances_are_those_of_differences_of_coordinates(name):
    rows = CLOUDS[name]
    expected = np.sort(cdist(rows, rows), axis=1)[:, 1:21]
    assert_allclose(space.nearest_distances(rows, 20), expected, rtol=1e-9, atol=0)


def test_distinct_rows_are_the_first_of_each_and_few_or_equal_ones_have_no_dimension():
    rows = random_rows(5, 6)[[3, 1, 3, 0, 1, 5]]
    assert_array_equal(space.distinct_rows(rows), [0, 1, 3, 5])
    assert_array_equal(space.distinct_rows(np.array([[0.0], [-0.0], [1.0]])), [0, 2])
    assert_array_equal(space.distinct_rows(np.zeros((4, 0))), [0])
    assert_array_equal(space.distinct_rows(np.zeros((0, 4))), [])
    rows = np.random.default_rng(0).integers(0, 3, (200, 4)).astype(np.float64)
    _, first = np.unique(rows, axis=0, return_index=True)
    assert_array_equal(space.distinct_rows(rows), np.sort(first))
    found = space.nearest_distances(np.array([[0.0], [3.0], [7.0]]), 4)
    assert_array_equal(found[:, 2:], np.nan)
    assert_allclose(found[:, :2], [[3, 7], [3, 4], [4, 7]], rtol=1e-14)
    assert_array_equal(space.nearest_distances(np.zeros((1, 5)), 2), [[np.nan, np.nan]])
    assert space.nearest_distances(np.zeros((0, 5)), 2).shape == (0, 2)
    for rows in (np.zeros((0, 3)), np.zeros((1, 3)), np.eye(2, 3), np.zeros((50, 3))):
        nearest = space.nearest_distances(rows, 4)
        assert np.isnan(space.two_nn(nearest))
        assert np.isnan(space.two_nn_fitted(nearest))
        assert np.isnan(space.levina_bickel(nearest, 4))
    ring = np.exp(2j * np.pi * np.arange(8) / 8)  # both neighbours equally far
    nearest = space.nearest_distances(np.stack([ring.real, ring.imag], axis=1).round(12), 2)
    assert not space.two_nn(nearest) < 1e6
    assert np.isnan(space.levina_bickel(space.nearest_distances(random_rows(0), 4), 1))


@pytest.mark.parametrize(
    ("dimension", "two", "averaged"), [(2, 1.96, 1.96), (5, 4.65, 4.54), (10, 8.40, 8.23)]
)
def test_cubes_have_the_worked_dimensions(dimension, two, averaged):
    """docs/theory.md B12, for other draws; the boundary makes them smaller than the dimension."""
    rows = np.random.default_rng(dimension).random((3000, dimension))
    nearest = space.nearest_distances(rows, 20)
    spread = 4.0 / np.sqrt(3000)  # of the mean of 3000 exponential numbers, four sigmas
    assert_allclose(space.two_nn(nearest), two, rtol=spread)
    assert_allclose(space.two_nn_fitted(nearest), two, rtol=2 * spread)
    found = [space.levina_bickel(nearest, k) for k in (10, 15, 20)]
    assert_allclose(np.median(found), averaged, rtol=0.03)
    assert found == sorted(found, reverse=True)  # wider neighbourhoods see more of the boundary


def ratios_of(dimension, tokens, seed):
    """First neighbour at 1, second drawn as points of that dimension have it: P(mu > m) = m^-d."""
    second = np.random.default_rng(seed).random(tokens) ** (-1.0 / dimension)
    return np.stack([np.ones(tokens), second], axis=1)


@pytest.mark.parametrize("dimension", [1.0, 7.5, 40.0])
def test_two_nn_is_unbiased_for_its_own_law(dimension):
    found = [space.two_nn(ratios_of(dimension, 30, seed)) for seed in range(2000)]
    error = 4 * np.std(found) / np.sqrt(len(found))
    assert_allclose(np.mean(found), dimension, rtol=0, atol=error)


def test_the_fit_is_a_line_of_nine_tenths_and_its_neighbour_a_mean_token_by_token():
    nearest = ratios_of(3.0, 50, 1)
    x = np.sort(np.log(nearest[:, 1]))[:45]
    y = -np.log(1.0 - np.arange(1, 46) / 50)
    slope, *_ = np.linalg.lstsq(x[:, None], y, rcond=None)
    assert_allclose(space.two_nn_fitted(nearest), slope[0], rtol=1e-12)
    assert np.isfinite(space.two_nn_fitted(nearest, 1.0))
    nearest = ratios_of(6.0, 2000, 0)
    spoilt = nearest.copy()
    worst = np.argsort(nearest[:, 1])[1850:]
    spoilt[worst, 1] = 1e6
    assert_array_equal(space.two_nn_fitted(spoilt), space.two_nn_fitted(nearest))
    assert_allclose(space.two_nn_fitted(nearest), 6.0, rtol=0.1)
    assert space.two_nn(spoilt) < 3.0
    nearest = space.nearest_distances(random_rows(7, 60), 5)
    inverse = [sum(np.log(row[4] / row[j]) for j in range(4)) / 4 for row in nearest]
    assert_allclose(space.levina_bickel(nearest, 5), 60 / sum(inverse), rtol=1e-12)


def raw_ratio(rows):
    whole = space.blocked_moments(rows, np.zeros(len(rows), np.int32), 1)
    return whole.of_blocks(np.ones(1, bool)).participation_ratio


@pytest.mark.parametrize("shape", [(30, 200), (200, 30)])
def test_participation_ratio_is_that_of_the_eigenvalues_of_the_covariance(shape):
    rows = random_rows(10, *shape) * np.arange(1.0, shape[1] + 1)
    values = np.linalg.eigvalsh(np.cov(rows.T))
    assert_allclose(raw_ratio(rows), values.sum() ** 2 / (values**2).sum(), rtol=1e-11)


def test_participation_ratios_at_their_corners():
    corrected = space.participation_ratio_corrected
    assert np.isnan(raw_ratio(np.zeros((4, 4))))
    assert_allclose(raw_ratio(CLOUDS["line"]), 1.0, rtol=1e-12)
    assert np.isnan([corrected(np.nan, 50), corrected(1.0, 1)]).all()
    assert corrected(9.0, 10) == np.inf  # white noise: as many as there can be
