"""Oracle: all pairs of tokens, Python's sets, all permutations, SciPy and scikit-learn."""

from itertools import permutations, product

import numpy as np
import pytest
import scipy.stats
from numpy.testing import assert_allclose, assert_array_equal, assert_equal
from sklearn.metrics import adjusted_mutual_info_score, mutual_info_score
from sklearn.metrics.cluster import contingency_matrix, expected_mutual_information

from moegeom.geometry.load import (
    corrected_information_share,
    expert_label_agreement,
    label_counts,
    num_shared,
    overlap_share,
    same_label_agreement,
)
from tests.by_day import by_day

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
    return [(t, u) for t, u in permutations(range(len(label)), 2) if label[t] == label[u]]


def test_counts_agreement_and_information_are_those_of_their_definitions(case):
    label, chosen, experts = case
    tokens, counts = label_counts(label, chosen, experts)
    for place, value in enumerate(sorted(set(label.tolist()))):
        rows = chosen[label == value]
        assert tokens[place] == len(rows)
        expected = [sum(e in row for row in rows.tolist()) for e in range(experts)]
        assert_array_equal(counts[place], expected)
    # With one label for all: of any two tokens.
    one = np.zeros_like(label)
    sets = [set(row) for row in chosen.tolist()]
    for some in (label, one):
        shares = [len(sets[t] & sets[u]) / chosen.shape[1] for t, u in ordered_pairs(some)]
        assert_allclose(same_label_agreement(some, chosen, experts), np.mean(shares), rtol=1e-13)
    found = expert_label_agreement(label, chosen, experts)
    for e in range(experts):
        others = [e in sets[u] for t, u in ordered_pairs(label) if e in sets[t]]
        assert_allclose(found[e], np.mean(others) if others else np.nan, rtol=1e-13)


def test_overlap_is_that_of_pythons_sets_and_no_order_of_tokens_slots_or_names_matters(case):
    label, chosen, experts = case
    random = np.random.default_rng(0)
    order = random.permutation(len(label))
    names = random.permutation(experts).astype(np.int32)
    moved = names[chosen[order][:, ::-1]]
    found = same_label_agreement(-3 * label[order], moved, experts)
    expected = same_label_agreement(label, chosen, experts)
    assert_allclose(found, expected, rtol=1e-14)
    found = expert_label_agreement(label[order], moved, experts)
    assert_array_equal(found[names], expert_label_agreement(label, chosen, experts))
    _, first, experts = case
    random = np.random.default_rng(9)
    second = np.argsort(random.random((len(first), experts)), axis=1)[:, : first.shape[1]]
    for t in range(len(first)):
        a, b = set(first[t].tolist()), set(second[t].tolist())
        row = slice(t, t + 1)
        assert_array_equal(num_shared(first[row], second[row]), len(a & b))
        assert_allclose(overlap_share(first[row], second[row]), len(a & b) / len(a))
    assert_array_equal(overlap_share(first, first[:, ::-1]), 1.0)


def test_labels_that_decide_agree_and_labels_that_never_repeat_tell_nothing():
    label = np.repeat(np.arange(5), 4)
    chosen = np.stack([label, (label + 1) % 9], axis=1).astype(np.int32)
    assert_equal(same_label_agreement(label, chosen, 9), 1.0)
    expected = np.where(np.arange(9) < 6, 1.0, np.nan)
    assert_array_equal(expert_label_agreement(label, chosen, 9), expected)
    assert_allclose(corrected_information_share(label, label % 3), 1.0, rtol=1e-12)
    label, chosen, experts = routing(0, 30, 3, 8, 2)
    own = np.arange(30)
    assert np.isnan(same_label_agreement(own, chosen, experts))
    assert np.isnan(expert_label_agreement(own, chosen, experts)).all()
    assert np.isnan(corrected_information_share(own, chosen[:, 0]))
    assert np.isnan(corrected_information_share(label, np.zeros(30, dtype=np.int64)))
    none = label[:0], chosen[:0]
    assert np.isnan(same_label_agreement(*none, experts))
    assert np.isnan(expert_label_agreement(*none, experts)).all()
    assert np.isnan(corrected_information_share(none[0], none[1][:, 0]))


def corrected(label, top1, by_chance: float) -> float:
    """From the information by scikit-learn and the entropy of the first choices by SciPy."""
    room = scipy.stats.entropy(np.unique(top1, return_counts=True)[1]) - by_chance
    own = mutual_info_score(label, top1) - by_chance
    return own / room if abs(room) > 1e-9 else np.nan


@pytest.mark.parametrize("seed", range(3))
def test_expected_information_is_the_mean_over_all_permutations(seed):
    random = np.random.default_rng(seed)
    label, top1 = random.integers(0, 3, 7), random.integers(0, 4, 7)
    information = [mutual_info_score(order, top1) for order in {*permutations(label.tolist())}]
    expected = corrected(label, top1, np.mean(information))
    assert_allclose(corrected_information_share(label, top1), expected, rtol=1e-9)


def labels_of(kind, tokens):
    random = np.random.default_rng(tokens)
    return {
        "rare": np.minimum(random.zipf(1.3, tokens), 50_000),
        "own": np.arange(tokens),
        "one": np.zeros(tokens, np.int64),
        "two": (np.arange(tokens) < tokens // 3).astype(np.int64),
        "even": np.arange(tokens) % 40,
    }[kind]


#: Kind of labels, tokens, experts.
TABLES = list(
    product(["rare", "own", "one", "two", "even"], [1, 2, 50, 4096, 16384], [1, 2, 7, 256])
)
TABLES_BY_DAY = {
    "rare labels": ("rare", 4096, 256),
    "labels that never repeat": ("own", 4096, 7),
    "one label": ("one", 50, 2),
    "two labels": ("two", 4096, 256),
    "even labels of many tokens": ("even", 16384, 7),
    "one token": ("rare", 1, 2),
    "two tokens": ("even", 2, 7),
    "one expert": ("rare", 50, 1),
}


@pytest.mark.parametrize(("kind", "tokens", "experts"), by_day(TABLES, TABLES_BY_DAY))
def test_information_and_what_shuffles_show_are_those_of_scikit_learn(kind, tokens, experts):
    label = labels_of(kind, tokens)
    top1 = np.random.default_rng(1).integers(0, experts, tokens)
    table = contingency_matrix(label, top1, sparse=True)
    expected = corrected(label, top1, expected_mutual_information(table, tokens))
    assert_allclose(corrected_information_share(label, top1), expected, 1e-9, 1e-10)


@pytest.mark.parametrize("case", CASES[:3], ids=str)  # few labels occur once
def test_the_corrected_share_is_scikit_learns_where_the_first_choice_has_less_entropy(case):
    """Their normalisation by the smaller entropy is then ours."""
    label, chosen, _ = routing(*case)
    top1 = np.minimum(chosen[:, 0], 1)
    found = corrected_information_share(label, top1)
    theirs = adjusted_mutual_info_score(label, top1, average_method="min")
    assert_allclose(found, theirs, rtol=1e-8, atol=1e-12)
