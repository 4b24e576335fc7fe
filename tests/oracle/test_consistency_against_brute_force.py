"""Oracle: all pairs of tokens, Python's sets, all permutations, SciPy and scikit-learn."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations
from math import log

import numpy as np
import pytest
import scipy.stats
from sklearn.metrics import adjusted_mutual_info_score, jaccard_score, mutual_info_score
from sklearn.metrics.cluster import contingency_matrix, expected_mutual_information

from moegeom.geometry.consistency import (
    corrected_information_share,
    even_jaccard,
    expected_information_nats,
    expert_label_agreement,
    jaccard,
    label_counts,
    mutual_information_nats,
    num_shared,
    overlap_share,
    same_label_agreement,
)

CASES = [(0, 60, 5, 8, 2), (1, 90, 40, 6, 1), (2, 25, 3, 12, 5), (3, 40, 200, 7, 7)]


def routing(seed, tokens, labels, experts, k):
    """Tokens whose choices lean on their label."""
    random = np.random.default_rng(seed)
    label = random.integers(0, labels, tokens) * 1000 - 7
    taste = random.standard_normal((labels, experts))[(label + 7) // 1000]
    noisy = taste + random.standard_normal((tokens, experts))
    return label, np.argsort(-noisy, axis=1)[:, :k].astype(np.int32), experts


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return routing(*request.param)


def ordered_pairs(label):
    for t in range(len(label)):
        for u in range(len(label)):
            if t != u and label[t] == label[u]:
                yield t, u


def test_counts_by_label_are_counted_one_by_one(case):
    label, chosen, experts = case
    tokens, counts = label_counts(label, chosen, experts)
    for place, value in enumerate(sorted(set(label.tolist()))):
        rows = chosen[label == value]
        assert tokens[place] == len(rows)
        expected = [sum(e in row for row in rows.tolist()) for e in range(experts)]
        np.testing.assert_array_equal(counts[place], expected)


def test_agreement_is_the_mean_over_all_pairs_of_one_label(case):
    label, chosen, experts = case
    sets = [set(row) for row in chosen.tolist()]
    found = [len(sets[t] & sets[u]) / chosen.shape[1] for t, u in ordered_pairs(label)]
    np.testing.assert_allclose(
        same_label_agreement(label, chosen, experts), np.mean(found), rtol=1e-13
    )


def test_with_one_label_agreement_is_that_of_any_two_tokens(case):
    _, chosen, experts = case
    sets = [set(row) for row in chosen.tolist()]
    found = [len(a & b) / chosen.shape[1] for a, b in combinations(sets, 2)]
    chance = same_label_agreement(np.zeros(len(chosen), dtype=np.int64), chosen, experts)
    np.testing.assert_allclose(chance, np.mean(found), rtol=1e-13)


def test_agreement_of_labels_that_tell_nothing_is_the_chance_level_on_average():
    """Also when most labels are rare."""
    _, chosen, experts = routing(5, 300, 4, 16, 3)
    random = np.random.default_rng(0)
    labels = [np.minimum(random.zipf(1.4, 300), 999) for _ in range(300)]
    found = [same_label_agreement(label, chosen, experts) for label in labels]
    chance = same_label_agreement(np.zeros_like(labels[0]), chosen, experts)
    error = 4 * np.std(found) / np.sqrt(len(found))
    np.testing.assert_allclose(np.mean(found), chance, rtol=0, atol=error)


def test_expert_agreement_is_the_share_of_pairs(case):
    label, chosen, experts = case
    found = expert_label_agreement(label, chosen, experts)
    sets = [set(row) for row in chosen.tolist()]
    for e in range(experts):
        others = [e in sets[u] for t, u in ordered_pairs(label) if e in sets[t]]
        np.testing.assert_allclose(found[e], np.mean(others) if others else np.nan, rtol=1e-13)


def test_agreement_is_the_mean_of_that_of_experts_by_their_pairs(case):
    label, chosen, experts = case
    tokens, counts = label_counts(label, chosen, experts)
    pairs = (counts * (tokens - 1)[:, None]).sum(axis=0)
    each = np.nan_to_num(expert_label_agreement(label, chosen, experts))
    np.testing.assert_allclose(
        same_label_agreement(label, chosen, experts), each @ pairs / pairs.sum(), rtol=1e-13
    )


def test_results_do_not_depend_on_the_order_of_tokens_slots_or_names(case):
    label, chosen, experts = case
    random = np.random.default_rng(0)
    order = random.permutation(len(label))
    names = random.permutation(experts).astype(np.int32)
    moved = names[chosen[order][:, ::-1]]
    found = same_label_agreement(-3 * label[order], moved, experts)
    expected = same_label_agreement(label, chosen, experts)
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    found = expert_label_agreement(label[order], moved, experts)
    np.testing.assert_array_equal(found[names], expert_label_agreement(label, chosen, experts))


def test_a_label_that_decides_agrees_fully():
    label = np.repeat(np.arange(5), 4)
    chosen = np.stack([label, (label + 1) % 9], axis=1).astype(np.int32)
    np.testing.assert_equal(same_label_agreement(label, chosen, 9), 1.0)
    expected = np.where(np.arange(9) < 6, 1.0, np.nan)
    np.testing.assert_array_equal(expert_label_agreement(label, chosen, 9), expected)
    np.testing.assert_allclose(corrected_information_share(label, label % 3), 1.0, rtol=1e-12)


def test_labels_that_never_repeat_and_no_tokens_have_no_agreement():
    label, chosen, experts = routing(0, 30, 3, 8, 2)
    own = np.arange(30)
    assert np.isnan(same_label_agreement(own, chosen, experts))
    assert np.isnan(expert_label_agreement(own, chosen, experts)).all()
    assert np.isnan(corrected_information_share(own, chosen[:, 0]))
    none = label[:0], chosen[:0]
    assert np.isnan(same_label_agreement(*none, experts))
    assert np.isnan(expert_label_agreement(*none, experts)).all()
    for function in (
        mutual_information_nats,
        expected_information_nats,
        corrected_information_share,
    ):
        assert np.isnan(function(none[0], none[1][:, 0]))
    assert np.isnan(corrected_information_share(label, np.zeros(30, dtype=np.int64)))


def test_information_is_the_sum_of_entropies_less_the_joint_one(case):
    label, chosen, experts = case
    top1 = chosen[:, 0]
    joint = scipy.stats.entropy(np.unique(label * experts + top1, return_counts=True)[1])
    parts = [scipy.stats.entropy(np.unique(x, return_counts=True)[1]) for x in (label, top1)]
    found = mutual_information_nats(label, top1)
    np.testing.assert_allclose(found, sum(parts) - joint, rtol=1e-10, atol=1e-12)


def information_of_pairs(label, top1):
    """Sum of p log(p / (q r)) over the pairs that occur."""
    tokens = len(label)
    first, second = Counter(label), Counter(top1)
    return sum(
        number / tokens * log(number * tokens / (first[a] * second[b]))
        for (a, b), number in Counter(zip(label, top1, strict=True)).items()
    )


@pytest.mark.parametrize("seed", range(3))
def test_expected_information_is_the_mean_over_all_permutations(seed):
    random = np.random.default_rng(seed)
    label, top1 = random.integers(0, 3, 7), random.integers(0, 4, 7)
    firsts = top1.tolist()
    found = [information_of_pairs(order, firsts) for order in permutations(label.tolist())]
    np.testing.assert_allclose(expected_information_nats(label, top1), np.mean(found), rtol=1e-9)


def labels_of(kind, tokens):
    random = np.random.default_rng(tokens)
    return {
        "rare": np.minimum(random.zipf(1.3, tokens), 50_000),
        "own": np.arange(tokens),
        "one": np.zeros(tokens, np.int64),
        "two": (np.arange(tokens) < tokens // 3).astype(np.int64),
        "even": np.arange(tokens) % 40,
    }[kind]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["rare", "own", "one", "two", "even"])
@pytest.mark.parametrize("tokens", [1, 2, 50, 4096, 16384])
@pytest.mark.parametrize("experts", [1, 2, 7, 256])
def test_information_and_what_shuffles_show_are_those_of_scikit_learn(kind, tokens, experts):
    label = labels_of(kind, tokens)
    top1 = np.random.default_rng(1).integers(0, experts, tokens)
    table = contingency_matrix(label, top1, sparse=True)
    found = [
        function(label, top1) for function in (mutual_information_nats, expected_information_nats)
    ]
    expected = [
        mutual_info_score(None, None, contingency=table),
        expected_mutual_information(table, tokens),
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_expected_information_is_the_mean_over_shuffles_of_many_rare_labels():
    random = np.random.default_rng(0)
    label = np.minimum(random.zipf(1.3, 2000), 50_000)
    top1 = random.integers(0, 32, 2000)
    found = [mutual_information_nats(random.permutation(label), top1) for _ in range(40)]
    error = 4 * np.std(found) / np.sqrt(len(found))
    np.testing.assert_allclose(
        expected_information_nats(label, top1), np.mean(found), rtol=0, atol=error
    )


def test_the_corrected_share_is_near_zero_for_labels_that_tell_nothing():
    random = np.random.default_rng(1)
    label = np.minimum(random.zipf(1.3, 2000), 50_000)
    found = [corrected_information_share(label, random.integers(0, 32, 2000)) for _ in range(40)]
    np.testing.assert_allclose(np.mean(found), 0.0, atol=4 * np.std(found) / np.sqrt(40))
    raw = mutual_information_nats(label, random.integers(0, 32, 2000))
    assert raw > 0.25 * np.log(32)  # what the correction takes away


@pytest.mark.parametrize("case", CASES[:3], ids=str)  # few labels occur once
def test_the_corrected_share_is_scikit_learns_where_the_first_choice_has_less_entropy(case):
    """Their normalisation by the smaller entropy is then ours."""
    label, chosen, _ = routing(*case)
    top1 = np.minimum(chosen[:, 0], 1)
    found = corrected_information_share(label, top1)
    theirs = adjusted_mutual_info_score(label, top1, average_method="min")
    np.testing.assert_allclose(found, theirs, rtol=1e-8, atol=1e-12)


def test_overlap_and_jaccard_are_those_of_pythons_sets(case):
    _, first, experts = case
    random = np.random.default_rng(9)
    second = np.argsort(random.random((len(first), experts)), axis=1)[:, : first.shape[1]]
    for t in range(len(first)):
        a, b = set(first[t].tolist()), set(second[t].tolist())
        row = slice(t, t + 1)
        np.testing.assert_array_equal(num_shared(first[row], second[row]), len(a & b))
        np.testing.assert_allclose(overlap_share(first[row], second[row]), len(a & b) / len(a))
        np.testing.assert_allclose(jaccard(first[row], second[row]), len(a & b) / len(a | b))
    inside = np.zeros((2, len(first), experts), dtype=int)
    for place, chosen in enumerate((first, second)):
        np.put_along_axis(inside[place], chosen.astype(np.int64), 1, axis=1)
    theirs = jaccard_score(inside[0], inside[1], average="samples")
    np.testing.assert_allclose(jaccard(first, second).mean(), theirs, rtol=1e-13)
    np.testing.assert_array_equal(overlap_share(first, first[:, ::-1]), 1.0)


@pytest.mark.parametrize(("experts", "k"), [(4, 1), (6, 2), (7, 3), (6, 5), (5, 5), (1, 1)])
def test_the_chance_of_jaccard_is_the_mean_over_all_sets(experts, k):
    sets = [set(chosen) for chosen in combinations(range(experts), k)]
    found = [len(sets[0] & other) / len(sets[0] | other) for other in sets]
    np.testing.assert_allclose(even_jaccard(experts, k), np.mean(found), rtol=1e-13)


@pytest.mark.parametrize(("experts", "k"), [(64, 8), (256, 8), (512, 10), (1024, 64)])
def test_the_chance_of_jaccard_is_that_of_scipys_hypergeometric(experts, k):
    x = np.arange(k + 1)
    expected = scipy.stats.hypergeom(experts, k, k).expect(lambda x: x / (2 * k - x))
    found = even_jaccard(experts, k)
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    np.testing.assert_allclose(scipy.stats.hypergeom(experts, k, k).pmf(x) @ x / k, k / experts)
    assert found > k / (2 * experts - k)
