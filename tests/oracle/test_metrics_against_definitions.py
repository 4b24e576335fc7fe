"""Oracle: every figure of a scan of the samples, computed again from the recorded arrays, and of
their spaces by SciPy's distances, singular values, sums token by token, and worked cubes.

Straight from the formulas, in float64, token by token where that is clearest, with scipy,
scikit-learn and torch for what they know. Nothing here uses a kernel or a reduction.
"""

import math
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from numpy.testing import assert_allclose, assert_array_equal, assert_equal
from scipy.spatial.distance import cdist
from sklearn.metrics import mutual_info_score
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.neighbors import NearestNeighbors
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from moegeom.checkpoint.open import open_checkpoint
from moegeom.geometry import space
from moegeom.kernels.reductions.samples import sample_size, token_hash
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"
CASES = [
    ("olmoe-balanced", "step_1500", 1),
    ("olmoe-collapsed", "step_1500", 2),
    ("deepseek-tiny", "step_1500", 0),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0])
def sample(request):
    """One router of a sample: its arrays, and what a scan says of it."""
    model, step, index = request.param
    router = load_routers(open_checkpoint(str(SAMPLES / model / step))).routers[index]
    source = open_tokens(str(SAMPLES / model / "rec" / step), None, None, (router.name,))
    tokens = source.facts.num_tokens
    y = np.array(source.read_values(router.name, 0, tokens), dtype=np.float64)
    columns = source.read_columns(0, tokens)
    run = RouterRun(router, source, METRICS.all())
    rows = measure_router(run).rows
    written = [
        row for row in rows["layers"] if (row["variant"], row["population"]) == ("as_stored", "all")
    ]
    (layer,) = written
    z = y @ router.weight.astype(np.float64).T
    chosen = np.array(source.read_chosen(router.name, 0, tokens)).astype(int)
    score = {"softmax": scipy.special.softmax(z, axis=1), "sigmoid": scipy.special.expit(z)}
    p = score[router.rule.score]
    return SimpleNamespace(
        router=router,
        y=y,
        z=z,
        p=p / p.sum(axis=1, keepdims=True),
        chosen=chosen,
        columns=columns,
        layer=layer,
        rows=rows,
        experts=router.num_experts,
        k=router.rule.top_k,
        tokens=tokens,
    )


def table(sample, name: str) -> list[dict]:
    """Rows of another table for the whole."""
    wanted = ("as_stored", "all")
    return [r for r in sample.rows[name] if (r["variant"], r["population"]) == wanted]


def close(found, expected, rtol=1e-6, atol=1e-9):
    assert_allclose(found, expected, rtol, atol)


def member(sample) -> np.ndarray:
    """[tokens, experts], 1 where chosen."""
    inside = np.zeros((sample.tokens, sample.experts))
    np.put_along_axis(inside, sample.chosen, 1.0, axis=1)
    return inside


def needs_linear_boundaries(sample):
    if not sample.router.rule.is_affine:
        assert sample.layer.get("rounding_sigmas_p50") is None
        assert 0.0 < sample.layer["distance_exact_share"] < 1.0
        pytest.skip("curved boundaries: distances have bounds, which tests of the kernel hold to")


def test_load_variants_capacity_and_ranks(sample):
    counts = member(sample).sum(axis=0)
    for row in table(sample, "capacity"):
        limit = np.ceil(row["capacity_factor"] * counts.sum() / sample.experts)
        assert row["capacity"] == limit
        close(row["dropped_slot_share"], np.maximum(0, counts - limit).sum() / counts.sum())
    ranks = table(sample, "ranks")
    assert [r["num_ranks"] for r in ranks] == [
        r for r in (2, 4, 8, 16, 32, 64) if r < sample.experts
    ]
    for row in ranks:
        load = np.array([part.sum() for part in np.split(counts, row["num_ranks"])])
        close(row["rank_imbalance"], load.max() / load.mean())
        close(row["balancedness"], load.mean() / load.max())
    load = counts / (sample.k * sample.tokens / sample.experts)
    q = load / sample.experts
    layer = sample.layer
    close(layer["max_vio_global"], load.max() - 1.0)
    close(layer["effective_experts"], np.exp(scipy.stats.entropy(q)))
    close(layer["load_cv_ddof0"], scipy.stats.variation(load))


def test_entropy_of_scores_and_losses(sample):
    expected = scipy.stats.entropy(sample.p, axis=1).mean() / np.log(sample.experts)
    close(sample.layer["routing_entropy_normalised"], expected, 1e-5)
    inside = np.take_along_axis(sample.p, sample.chosen, axis=1)
    close(sample.layer["chosen_score_share"], inside.sum(axis=1).mean(), 1e-5)
    expected = scipy.stats.entropy(inside, axis=1).mean()
    close(sample.layer["chosen_entropy_nats"], expected, 1e-5)
    lse = scipy.special.logsumexp(sample.z, axis=1)
    close(sample.layer["z_loss"], (lse**2).mean(), 1e-4)
    close(sample.layer["log_sum_exp_mean"], lse.mean(), 1e-4, 1e-5)
    loss = sample.layer["load_balancing_loss_megatron"] * sample.k
    share = member(sample).mean(axis=0)
    close(loss, sample.experts * (share * sample.p.mean(axis=0)).sum(), 1e-5)
    if sample.router.rule.score == "softmax":
        logits = torch.from_numpy(sample.z)
        theirs = load_balancing_loss_func((logits,), sample.experts, sample.k)
        close(loss, float(theirs), 1e-5)


def test_coactivation_and_its_chance(sample):
    inside = member(sample)
    sets = [set(np.flatnonzero(inside[:, e])) for e in range(sample.experts)]
    found = [len(a & b) / len(a | b) for a, b in combinations(sets, 2) if a | b]
    close(sample.layer["overlap_routing"], np.mean(found))
    both = inside.T @ inside
    pairs = both[np.triu_indices(sample.experts, 1)]
    chance = sample.k * (sample.k - 1) / (sample.experts * (sample.experts - 1))
    close(sample.layer["coactivation_max_over_chance"], pairs.max() / sample.tokens / chance)
    for row in table(sample, "coactivation")[:20]:
        i, j = row["expert"], row["other_expert"]
        assert row["num_tokens_together"] == both[i, j]
        close(row["share_of_expert"], both[i, j] / both[i, i])
        close(row["share_of_other"], both[i, j] / both[j, j])
    random = np.random.default_rng(0)
    drawn = np.argsort(random.random((20_000, sample.experts)), axis=1)[:, : sample.k]
    inside = np.zeros((len(drawn), sample.experts))
    np.put_along_axis(inside, drawn, 1.0, axis=1)
    both = inside.T @ inside
    i, j = np.triu_indices(sample.experts, 1)
    jaccard = both[i, j] / (both[i, i] + both[j, j] - both[i, j])
    close(sample.layer["overlap_routing_chance"], jaccard.mean(), 0.02)


def neighbours(sample):
    """Pairs of neighbouring tokens of one document and one tile."""
    for t in range(sample.tokens - 1):
        if (
            sample.columns.document[t] == sample.columns.document[t + 1]
            and t // 1024 == (t + 1) // 1024
        ):
            yield t, t + 1


def test_neighbours_and_first_choices(sample):
    overlap = [len({*sample.chosen[a]} & {*sample.chosen[b]}) for a, b in neighbours(sample)]
    assert sample.layer["num_neighbours"] == len(overlap)
    close(sample.layer["neighbour_overlap"], np.mean(overlap) / sample.k)
    close(sample.layer["neighbour_same_set"], np.mean(np.array(overlap) == sample.k))
    share = member(sample).mean(axis=0)
    close(sample.layer["neighbour_overlap_chance"], (share**2).sum() / sample.k)
    first = first_choices(sample)
    repeat = np.mean([first[a] == first[b] for a, b in neighbours(sample)])
    close(sample.layer["first_choice_repeat"], repeat, 2e-3)
    share = np.bincount(first, minlength=sample.experts) / sample.tokens
    close(sample.layer["first_choice_repeat_chance"], (share**2).sum(), 2e-3)
    entropy = scipy.stats.entropy(share) / np.log(sample.experts)
    close(sample.layer["first_choice_entropy_normalised"], entropy, 1e-3)


def first_choices(sample) -> np.ndarray:
    """The chosen expert with the highest selection score; engines need not record it first."""
    bias = sample.router.selection_bias
    selection = sample.z if bias is None else scipy.special.expit(sample.z) + bias
    best = np.take_along_axis(selection, sample.chosen, axis=1).argmax(axis=1)
    return sample.chosen[np.arange(sample.tokens), best]


def test_information_of_the_domain(sample):
    domain = np.repeat(sample.columns.domain, sample.k)
    expert = sample.chosen.ravel()
    information = mutual_info_score(domain, expert)
    close(sample.layer["domain_information_nats"], information, 1e-9)
    entropy = scipy.stats.entropy(np.bincount(expert))
    close(sample.layer["domain_information_share"], information / entropy, 1e-9)
    random = np.random.default_rng(0)
    shuffled = [mutual_info_score(random.permutation(domain), expert) for _ in range(20)]
    close(sample.layer["domain_information_floor_nats"], np.mean(shuffled), 0.15)


def nearest_boundaries(sample, length):
    """min (z_i - z_j) / length(i, j) over i chosen, j not, token by token."""
    inside = member(sample) > 0
    found = np.empty(sample.tokens)
    for t in range(sample.tokens):
        gap = sample.z[t, inside[t]][:, None] - sample.z[t, ~inside[t]][None, :]
        found[t] = (gap / length(t, inside[t])).min()
    return found


def test_distances_in_sigmas_and_rounding_noise(sample):
    needs_linear_boundaries(sample)
    w = sample.router.weight.astype(np.float64)
    apart = np.linalg.norm(w[:, None] - w[None, :], axis=2)
    distance = nearest_boundaries(sample, lambda t, inside: apart[np.ix_(inside, ~inside)])
    norm = np.linalg.norm(sample.y, axis=1)
    relative = distance / norm
    close(sample.layer["boundary_distance_over_norm_p50"], np.median(relative), 0.06)
    close(sample.layer["boundary_distance_over_norm_p01"], np.quantile(relative, 0.01), 0.08)
    least = sample.layer["tropical_saturation"]
    assert least <= relative.min() * 1.001 + 1e-7
    assert least >= relative.min() * 0.93 - 1e-7
    sigmas = distance / (0.4247 * 2.0**-8 * norm / np.sqrt(sample.y.shape[1]))
    close(sample.layer["noise_sigmas_p50"], np.median(sigmas), 0.06)
    for row in table(sample, "margins"):
        if row["quantity"] == "noise_sigmas":
            close(row["share_below"], (sigmas < row["threshold"]).mean(), 0.01, 1e-3)

    def sigma(t, inside):
        difference = (w[inside][:, None] - w[~inside][None, :]) * sample.y[t]
        return 0.4247 * 2.0**-8 * np.linalg.norm(difference, axis=2)

    found = nearest_boundaries(sample, sigma)
    close(sample.layer["rounding_sigmas_p50"], np.median(found), 0.06)
    close(sample.layer["bf16_flip_share"], scipy.stats.norm.sf(found).mean(), 5e-3)
    # Inputs really rounded to bfloat16: the share that flips is near the prediction.
    rounded = sample.y.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    z = rounded @ sample.router.weight.astype(np.float64).T
    order = np.sort(np.argsort(-z, axis=1, kind="stable")[:, : sample.k], axis=1)
    flipped = (order != np.sort(sample.chosen, axis=1)).any(axis=1).mean()
    predicted = sample.layer["bf16_flip_share"]
    assert abs(flipped - predicted) < 4 * np.sqrt(predicted / sample.tokens) + 1e-3
    # Without biases boundaries are planes through 0 of the rows times the gain.
    effective = sample.router.weight.astype(np.float64) * sample.router.gain
    apart = np.linalg.norm(effective[:, None] - effective[None, :], axis=2)
    length = np.linalg.norm(sample.y / sample.router.gain, axis=1)
    sine = nearest_boundaries(sample, lambda t, inside: apart[np.ix_(inside, ~inside)] * length[t])
    angle = np.arcsin(sine)
    close(sample.layer["pre_norm_angle_p50"], np.median(angle), 0.06)
    close(sample.layer["pre_norm_angle_p01"], np.quantile(angle, 0.01), 0.08)


def usual(sample) -> np.ndarray:
    """Tokens whose norm is within a factor of 4 of the median."""
    norm = np.linalg.norm(sample.y, axis=1)
    return (norm < 4 * np.median(norm)) & (norm * 4 > np.median(norm))


def sampled_inputs(sample) -> np.ndarray:
    """The sample of inputs that the metrics take, in the order of the hashes of the tokens."""
    hashed = token_hash(np.arange(sample.tokens))
    share = sample_size(sample.y.shape[1]) / sample.tokens
    order = np.argsort(hashed)
    return sample.y[order[(hashed[order] <= share * 2.0**64) & usual(sample)[order]]]


def test_directions_and_input_pull(sample):
    cosine = cosine_similarity(sample.y)
    close(sample.layer["mean_pairwise_cosine"], cosine[~np.eye(sample.tokens, dtype=bool)].mean())
    scores = sample.z if sample.router.rule.score == "softmax" else scipy.special.expit(sample.z)
    bias = sample.router.selection_bias
    for name, added in (("input_pull", 0.0), ("input_pull_with_bias", bias)):
        if added is None:
            assert sample.layer[name] is None
            continue
        apart = torch.from_numpy(scores[usual(sample)] + added)
        apart = apart - apart.mean(dim=1, keepdim=True)
        rest, mean = torch.std_mean(apart, dim=0, correction=0)
        close(sample.layer[name], (mean.norm() / rest.norm()).item(), 1e-5)


def test_participation_ratio_and_intrinsic_dimension(sample):
    y = sampled_inputs(sample)
    values = np.linalg.eigvalsh(np.cov(y.T))
    raw = values.sum() ** 2 / (values**2).sum()
    close(sample.layer["participation_ratio_raw"], raw, 1e-8)
    n = len(y) - 1
    close(sample.layer["participation_ratio"], 1 / ((1 / raw - 1 / n) / (1 + 1 / n)), 1e-8)
    y = np.unique(y, axis=0)
    distance, _ = NearestNeighbors(n_neighbors=21, algorithm="ball_tree").fit(y).kneighbors(y)
    ratio = np.log(distance[:, 2] / distance[:, 1])
    close(sample.layer["intrinsic_dimension_two_nn"], (len(y) - 1) / ratio.sum())
    inverse = np.log(distance[:, 20:21] / distance[:, 1:20]).mean(axis=1)
    close(sample.layer["intrinsic_dimension_mle_20"], 1 / inverse.mean())
    values = [row["dimension"] for row in table(sample, "intrinsic_dimension")]
    assert sample.layer["intrinsic_dimension_low"] == min(values)
    assert sample.layer["intrinsic_dimension_high"] == max(values)


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
    share, chance = space.neighbours_of_same_label(space.distances(rows), label, 10)
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
    assert space.silhouette(space.distances(rows), label) == pytest.approx(
        np.mean(widths), abs=1e-9
    )


def test_equal_points_single_labels_and_few_tokens_have_no_figure():
    rows = np.ones((20, 4))
    components = space.principal_components(rows)
    assert np.isnan(components.shares).all()
    assert not components.points.any()
    label = np.zeros(20, np.int64)
    apart = space.distances(rows)
    assert math.isnan(space.silhouette(apart, label))
    assert space.silhouette(space.distances(random_rows(0, 20)), np.arange(20)) == 0.0
    assert np.isnan(space.neighbours_of_same_label(apart[:5, :5], label[:5], 10)).all()


# ----------------------------------------------------------------------------------------- carriers
TOKENS, HIDDEN, WIDTH = 300, 40, 12


def layer(seed=0):
    """Inputs with a decaying spectrum, an output affine in them, and one that is not."""
    random = np.random.default_rng(seed)
    inputs = random.standard_normal((TOKENS, HIDDEN)) * 0.7 ** np.arange(HIDDEN) + 0.4
    affine = inputs @ random.standard_normal((HIDDEN, WIDTH)) + random.standard_normal(WIDTH)
    bent = np.tanh(3.0 * inputs @ random.standard_normal((HIDDEN, WIDTH)))
    return inputs, affine, bent, random.random(TOKENS) < 0.75


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


@pytest.mark.parametrize("rows", CLOUDS.values(), ids=CLOUDS)
def test_distances_are_those_of_differences_of_coordinates(rows):
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
