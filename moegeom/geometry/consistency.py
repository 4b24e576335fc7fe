"""How consistently experts are chosen: by tokens with one label, and by two routings of a token.

A label is a number, such as a token id. Every slot is filled, and no expert fills two of a token.
"""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Float64, Int, Int32, Int64

Labels = Int[np.ndarray, "tokens"]
Chosen = Int[np.ndarray, "tokens k"]

#: Terms of the expected information that are computed at a time.
_TERMS = 1 << 18

#: Of the entropy; what is left beside less information is the rounding of factorials.
_NO_ROOM = 1e-9


def label_counts(
    label: Labels, chosen: Int32[np.ndarray, "tokens k"], num_experts: int
) -> tuple[Int64[np.ndarray, "labels"], Int64[np.ndarray, "labels experts"]]:
    """Tokens of each label, and those of them that choose each expert; -1 is an empty slot."""
    _, place, tokens = np.unique(label, return_inverse=True, return_counts=True)
    key = place[:, None] * num_experts + chosen
    is_taken = chosen >= 0
    key = key.ravel() if is_taken.all() else key[is_taken]
    counts = np.bincount(key, minlength=len(tokens) * num_experts)
    return tokens.astype(np.int64), counts.reshape(len(tokens), num_experts).astype(np.int64)


def same_label_agreement(
    label: Labels, chosen: Int32[np.ndarray, "tokens k"], num_experts: int
) -> float:
    r"""Mean of :math:`|S_t \cap S_u| / k` over pairs of different tokens with one label.

    :math:`\sum_v (\sum_e N_{ve}^2 - k n_v) / (k \sum_v n_v (n_v - 1))`: pairs of a token with
    itself are left out, so that rare labels do not raise it. 0 to 1; nan when no label repeats.
    With one label for all it is the chance level. Source: docs/theory.md D3 (c). Oracle in tests:
    all pairs.
    """
    tokens, counts = label_counts(label, chosen, num_experts)
    pairs = int((tokens * (tokens - 1)).sum())
    if not pairs:
        return float("nan")
    top_k = chosen.shape[1]
    return float(((counts**2).sum() - top_k * tokens.sum()) / (top_k * pairs))


def expert_label_agreement(
    label: Labels, chosen: Int32[np.ndarray, "tokens k"], num_experts: int
) -> Float64[np.ndarray, "experts"]:
    r"""Probability that another token of the label goes to the expert too, given that one did.

    :math:`\sum_v N_{ve} (N_{ve} - 1) / \sum_v N_{ve} (n_v - 1)`; nan for an expert whose tokens all
    have labels of their own. Source: docs/theory.md D3 (c); oracle in tests: all pairs.
    """
    tokens, counts = label_counts(label, chosen, num_experts)
    both = (counts * (counts - 1)).sum(axis=0)
    possible = (counts * (tokens - 1)[:, None]).sum(axis=0)
    return np.divide(both, possible, out=np.full(num_experts, np.nan), where=possible > 0)


def corrected_information_share(label: Labels, top1: Labels) -> float:
    """(I - I_0) / (H - I_0): information of the label about the first choice, less chance.

    I is the mutual information, I_0 its mean when the labels are shuffled among the tokens, and H
    the entropy of the first choices. 0 on average for labels that tell nothing (it may be
    negative), 1 when the label decides; nan where H = I_0: without tokens, for a single first
    choice, and when every token has a label of its own. Source: Vinh, Epps and Bailey 2010;
    docs/theory.md D3. Oracle in tests: shuffles.
    """
    information, expected, entropy = _information(label, top1)
    room = entropy - expected
    return (information - expected) / room if room > _NO_ROOM * max(entropy, 1.0) else float("nan")


def _information(label: Labels, top1: Labels) -> tuple[float, float, float]:
    """Mutual information, its mean over shuffles, and the entropy of the first choices."""
    num = len(label)
    if not num:
        return float("nan"), float("nan"), float("nan")
    _, labels, of_label = np.unique(label, return_inverse=True, return_counts=True)
    _, top1, of_top1 = np.unique(top1, return_inverse=True, return_counts=True)
    pair, of_pair = np.unique(labels * len(of_top1) + top1, return_counts=True)
    first, second = np.divmod(pair, len(of_top1))
    terms = of_pair / num * np.log(of_pair * num / (of_label[first] * of_top1[second]))
    share = of_top1 / num
    return (
        max(float(terms.sum()), 0.0),
        _expected_information(of_label, of_top1, num),
        float(-(share * np.log(share)).sum()),
    )


def _expected_information(
    of_label: Int64[np.ndarray, "labels"], of_top1: Int64[np.ndarray, "top1"], num: int
) -> float:
    r"""Sum over pairs of :math:`E[n/T \log(n T / (a b))]`, n hypergeometric from a, b and T.

    Equal counts have equal terms, so that each pair of *different* counts is looked at once.
    """
    from scipy.special import gammaln

    log_factorial = gammaln(np.arange(num + 1) + 1.0)
    sizes, times = np.unique(of_top1, return_counts=True)
    total = 0.0
    for a, repeats in zip(*np.unique(of_label, return_counts=True), strict=True):
        for part in np.array_split(np.arange(len(sizes)), len(sizes) * a // _TERMS + 1):
            b, weight = sizes[part][:, None], times[part]
            n = np.arange(1, a + 1)[None, :]
            possible = (n <= b) & (n >= a + b - num)
            n, rest = np.where(possible, n, 0), np.where(possible, num - a - b + n, 0)
            out, other = np.where(possible, a - n, 0), np.where(possible, b - n, 0)
            chance = log_factorial[a] + log_factorial[b] + log_factorial[num - a]
            chance = chance + log_factorial[num - b] - log_factorial[num] - log_factorial[n]
            chance -= log_factorial[out] + log_factorial[other] + log_factorial[rest]
            gain = np.log(np.maximum(n, 1) * (num / (a * b)))
            terms = n / num * gain * np.exp(np.where(possible, chance, -np.inf))
            total += float(repeats) * float((weight * terms.sum(axis=1)).sum())
    return total


def num_shared(first: Chosen, second: Chosen) -> Int64[np.ndarray, "tokens"]:
    r""":math:`|A_t \cap B_t|`, the experts of each token that both routings choose; 0 to k.

    Oracle in tests: Python's sets.
    """
    # in the sorted union of two rows a shared expert stands twice, next to itself
    both = np.sort(np.concatenate([first, second], axis=1), axis=1)
    return (both[:, 1:] == both[:, :-1]).sum(axis=1)


def overlap_share(first: Chosen, second: Chosen) -> Float64[np.ndarray, "tokens"]:
    r""":math:`|A_t \cap B_t| / k` of each token: 1 for equal sets, 0 for sets that share nothing.

    For sets drawn evenly and independently its mean is k / E. Source: docs/theory.md D3 (a).
    """
    return num_shared(first, second) / first.shape[1]
