"""Oracle: every figure of a scan of the samples, computed again from the recorded arrays.

Straight from the formulas, in float64, token by token where that is clearest, with scipy,
scikit-learn and torch for what they know. Nothing here uses a kernel, a reduction or a metric.
"""

from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import scipy.special
import scipy.stats
import torch
from numpy.testing import assert_allclose
from sklearn.metrics import mutual_info_score
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.neighbors import NearestNeighbors
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from moegeom.checkpoint.open import open_checkpoint
from moegeom.engine.run_facts import router_facts
from moegeom.kernels.reductions.samples import sample_size, token_hash
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.results.reader import with_derived
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
    (layer,) = with_derived(pa.Table.from_pylist(written), [router_facts(router)]).to_pylist()
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
    close(layer["avg_vio_global"], np.abs(load - 1).mean())
    close(layer["load_imbalance_global"], load.max())
    close(layer["jain"], load.sum() ** 2 / (sample.experts * (load**2).sum()))
    close(layer["kl_to_uniform_nats"], scipy.stats.entropy(q, np.full(len(q), 1 / len(q))))
    close(layer["diversity"], np.exp(scipy.stats.entropy(q)) / sample.experts)
    close(layer["load_cv_ddof0"], scipy.stats.variation(load))
    inside = member(sample).reshape(-1, 1024, sample.experts).sum(axis=1)
    vio = inside.max(axis=1) / (sample.k * 1024 / sample.experts) - 1
    close(layer["max_vio_tile_mean"], vio.mean())
    assert layer["num_tiles"] == 4
    groups = sample.router.rule.groups
    if groups is None:
        assert layer.get("group_max_vio") is None
        return
    load = load.reshape(groups.num_groups, -1).sum(axis=1)
    close(layer["group_max_vio"], load.max() / load.mean() - 1)
    assert layer["busiest_group"] == load.argmax()


def test_entropy_of_scores_and_losses(sample):
    close(sample.layer["routing_entropy_nats"], scipy.stats.entropy(sample.p, axis=1).mean(), 1e-5)
    inside = np.take_along_axis(sample.p, sample.chosen, axis=1)
    close(sample.layer["chosen_score_share"], inside.sum(axis=1).mean(), 1e-5)
    expected = scipy.stats.entropy(inside, axis=1).mean()
    close(sample.layer["chosen_entropy_nats"], expected, 1e-5)
    close(sample.layer["chosen_entropy_normalised"], expected / np.log(sample.k), 1e-5)
    lse = scipy.special.logsumexp(sample.z, axis=1)
    close(sample.layer["z_loss"], (lse**2).mean(), 1e-4)
    close(sample.layer["log_sum_exp_mean"], lse.mean(), 1e-4, 1e-5)
    loss = sample.layer["load_balancing_loss_hf"]
    share = member(sample).mean(axis=0)
    close(loss, sample.experts * (share * sample.p.mean(axis=0)).sum(), 1e-5)
    close(sample.layer["load_balancing_loss_megatron"], loss / sample.k)
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
    assert sample.layer["num_pairs_seen"] == (pairs > 0).sum()
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


def test_token_identity_and_rarefaction(sample):
    inside = member(sample)
    overlap = inside @ inside.T
    same = sample.columns.token_id[:, None] == sample.columns.token_id[None, :]
    np.fill_diagonal(same, False)
    close(sample.layer["same_token_overlap"], overlap[same].mean() / sample.k)
    off = ~np.eye(sample.tokens, dtype=bool)
    close(sample.layer["same_token_overlap_chance"], overlap[off].mean() / sample.k)
    assert sample.layer["num_token_ids"] == len(set(sample.columns.token_id))
    together = same @ inside  # of each token, others with its id that chose an expert
    for row in table(sample, "experts"):
        uses = inside[:, row["expert"]] > 0
        pairs = same[uses].sum()
        if pairs:
            close(row["vocabulary_specialisation"], together[uses, row["expert"]].sum() / pairs)
    # By drawing tokens again and again.
    sets = np.array([hash(tuple(sorted(row))) for row in sample.chosen.tolist()])
    random = np.random.default_rng(0)
    for row in table(sample, "rarefaction"):
        size = row["num_tokens_drawn"]
        if size in (64, 1024, sample.tokens):
            drawn = [len(set(random.choice(sets, size, replace=False))) for _ in range(20)]
            close(row["expected_expert_sets"], np.mean(drawn), 0.02)
    assert table(sample, "rarefaction")[-1]["expected_expert_sets"] == pytest.approx(len(set(sets)))


def test_information_of_the_token_id_and_of_the_domain(sample):
    """Less the mean over shuffles, which the exact expectation replaces."""
    first = first_choices(sample)
    information = mutual_info_score(sample.columns.token_id, first)
    random = np.random.default_rng(0)
    shuffled = [
        mutual_info_score(random.permutation(sample.columns.token_id), first) for _ in range(20)
    ]
    chance = np.mean(shuffled)
    entropy = scipy.stats.entropy(np.bincount(first))
    expected = (information - chance) / (entropy - chance)
    close(sample.layer["token_id_information_share"], expected, 0.02)
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


def test_directions_collapse_and_input_pull(sample):
    cosine = cosine_similarity(sample.y)
    close(sample.layer["mean_pairwise_cosine"], cosine[~np.eye(sample.tokens, dtype=bool)].mean())
    y = sampled_inputs(sample)
    radius = np.quantile(np.linalg.norm(y - y.mean(axis=0), axis=1), 0.99)
    ratio = radius / np.linalg.norm(y.mean(axis=0))
    close(sample.layer["cap_radius_over_mean"], ratio)
    half_angle = sample.layer["cap_half_angle"]
    if ratio < 1:
        close(half_angle, np.arcsin(ratio))
    else:
        assert half_angle is None
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
