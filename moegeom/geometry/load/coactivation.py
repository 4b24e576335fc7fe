"""Experts chosen together: from tokens by pair of experts to figures.

Counts N are symmetric, N_ij the tokens that chose both, the diagonal those that chose the expert.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

Pairs = Int64[np.ndarray, "experts experts"]


def jaccard_mean(counts: Pairs) -> float:
    r"""Mean over pairs of :math:`N_{ij} / (N_i + N_j - N_{ij})`; nan when no pair has a token.

    Pairs of two dead experts are left out. Source: docs/theory.md D3; oracle: sets of tokens.
    """
    own = np.diag(counts)
    first, second = np.triu_indices(len(counts), 1)
    together = counts[first, second]
    either = own[first] + own[second] - together
    known = either > 0
    return float((together[known] / either[known]).mean()) if known.any() else float("nan")


def jaccard_chance(num_experts: int, top_k: int) -> float:
    """The same for sets drawn evenly, (k - 1) / (2E - k - 1); nan for a single expert.

    In the limit of many tokens. Source: docs/theory.md D3; oracle in tests: drawn sets.
    """
    if num_experts < 2:
        return float("nan")
    return (top_k - 1) / (2 * num_experts - top_k - 1)


def coactivation_over_chance(
    counts: Pairs, num_tokens: int, top_k: int
) -> Float64[np.ndarray, "experts experts"]:
    r"""Frequency of each pair over that of even chance, :math:`k (k - 1) / (E (E - 1))`.

    The diagonal means nothing. nan for k = 1, where no pair can be chosen, and without tokens.
    Source: docs/theory.md D3.
    """
    experts = len(counts)
    if top_k < 2 or not num_tokens:
        return np.full((experts, experts), np.nan)
    return counts / num_tokens / (top_k * (top_k - 1) / (experts * (experts - 1)))


def conditional_coactivation(counts: Pairs) -> Float64[np.ndarray, "experts experts"]:
    r"""Share of the tokens of i that chose j too, :math:`N_{ij} / N_i`, in row i and column j.

    0 to 1, 1 on the diagonal; a row of nan for a dead expert. Rows add up to k. All chosen experts
    count, not only neighbours in rank. Source: docs/theory.md D3; oracle in tests: sets of tokens.
    """
    own = np.diag(counts)[:, None]
    return np.divide(counts, own, out=np.full(counts.shape, np.nan), where=own > 0)


def num_pairs_seen(counts: Pairs) -> int:
    """Pairs of different experts that some token chose."""
    return int(np.count_nonzero(np.triu(counts, 1)))
