"""How evenly experts are used: one function per quantity, each vectorised over leading axes."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64, Int64

#: One number per vector of counts: a NumPy scalar when there is only one vector.
PerVector = Float64[np.ndarray, "*batch"] | np.float64

#: An expert below this share of its fair load is underused (docs/theory.md D3, there "dead").
UNDERUSED_BELOW = 0.1


def _fair(counts: Int64[np.ndarray, "*batch experts"]) -> Float64[np.ndarray, "*batch 1"]:
    """Mean count per expert; nan instead of 0, so that nothing measured stays nothing."""
    mean = counts.mean(axis=-1, keepdims=True)
    return np.where(mean == 0.0, np.nan, mean)


def load_share(
    counts: Int64[np.ndarray, "*batch experts"],
) -> Float64[np.ndarray, "*batch experts"]:
    """Load in units of the fair share, c_e E / sum c; 1 is fair; nan when nothing was chosen."""
    return counts / _fair(counts)


def load_cv(counts: Int64[np.ndarray, "*batch experts"], ddof: int = 0) -> PerVector:
    """Standard deviation of the counts divided by their mean; 0 at balance.

    ``ddof`` 0 is the population value; both occur in practice. Source: docs/theory.md D3; oracle:
    scipy.stats.variation.
    """
    return load_share(counts).std(axis=-1, ddof=ddof)


def max_vio(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    """Largest load over the fair share, minus 1; in [0, E/k - 1].

    Source: arXiv 2408.15664, equation 4.
    """
    return load_share(counts).max(axis=-1) - 1.0


def min_vio(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    """Smallest load over the fair share, minus 1; -1 when an expert is dead."""
    return load_share(counts).min(axis=-1) - 1.0


def gini(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    r"""Gini coefficient, :math:`\sum_i (2i - E - 1) c_{(i)} / (E \sum c)`, counts ascending.

    0 at balance, 1 - 1/E when one expert takes everything. Oracle: mean absolute difference.
    """
    experts = counts.shape[-1]
    ranks = 2.0 * np.arange(1, experts + 1) - experts - 1.0
    ascending = np.sort(load_share(counts), axis=-1)
    return (ascending * ranks).sum(axis=-1) / experts**2


def load_entropy_nats(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    """Entropy of the share of slots that each expert takes, in nats; log E at balance.

    0 log 0 = 0. Oracle: scipy.stats.entropy.
    """
    share = load_share(counts) / counts.shape[-1]
    # log 1 = 0 stands in for log 0, whose share is 0
    return -(share * np.log(np.where(share == 0.0, 1.0, share))).sum(axis=-1)


def dead_share(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    """Share of experts that no token chose."""
    return np.where(np.isnan(_fair(counts)[..., 0]), np.nan, (counts == 0).mean(axis=-1))


def underused_share(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    """Share of experts with less than a tenth of the fair load, dead ones included."""
    share = load_share(counts)
    underused = (share < UNDERUSED_BELOW).mean(axis=-1)
    return np.where(np.isnan(_fair(counts)[..., 0]), np.nan, underused)


def avg_vio(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    """Mean distance of a load from the fair share, in fair shares; in [0, 2 (1 - 1/E)]."""
    return np.abs(load_share(counts) - 1.0).mean(axis=-1)


def jain(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    r"""Jain's fairness index, :math:`(\sum c)^2 / (E \sum c^2) = 1 / (1 + CV^2)`; 1 at balance."""
    return np.float64(1.0) / (1.0 + load_cv(counts) ** 2)


def kl_to_uniform_nats(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    """Kullback-Leibler divergence of the load from even load, log E - H; 0 at balance."""
    return np.log(counts.shape[-1]) - load_entropy_nats(counts)


def load_cv_squared_debiased(block_counts: Int64[np.ndarray, "blocks experts"]) -> float:
    r"""Squared CV of the expected load, without what the choice of documents adds.

    :math:`\sum_{a \ne b} v_a v_b \langle x_a - 1, x_b - 1 \rangle / (E (1 - \sum v^2))`, x_b the
    load of block b in fair shares and v_b its share of the slots: products of different blocks,
    whose errors are independent, so that the mean over documents is the true value. Negative when
    nothing but noise is seen. nan for fewer than two blocks with tokens.
    Oracle in tests: Monte Carlo over documents.
    """
    counts = block_counts[block_counts.sum(axis=1) > 0].astype(np.float64)
    if len(counts) < 2:
        return float("nan")
    share = counts.sum(axis=1) / counts.sum()
    excess = (load_share(counts.astype(np.int64)) - 1.0) * share[:, None]
    products = (excess.sum(axis=0) ** 2).sum() - (excess**2).sum()
    return float(products / (counts.shape[1] * (1.0 - (share**2).sum())))


def max_vio_floor(num_tokens: int, num_experts: int, top_k: int) -> float:
    r"""MaxVio that perfectly even random routing shows on this many independent tokens, at most.

    :math:`\sqrt{2 \log E (1 - k/E) / m}`, m = kT/E; about a fifth above the mean (E = 64, k = 8).
    nan without tokens. Source: docs/theory.md D3; oracle: Monte Carlo.
    """
    return math.sqrt(2.0 * math.log(num_experts)) * load_cv_floor(num_tokens, num_experts, top_k)


def load_cv_floor(num_tokens: int, num_experts: int, top_k: int) -> float:
    r"""CV that perfectly even random routing shows on this many independent tokens.

    :math:`\sqrt{(1 - k/E) / m}` with m = kT/E tokens per expert. Real tokens are not independent,
    so a balanced router shows more. nan without tokens.
    Source: docs/theory.md D3; oracle: Monte Carlo.
    """
    if num_tokens == 0:
        return float("nan")
    mean = top_k * num_tokens / num_experts
    return float(np.sqrt((1.0 - top_k / num_experts) / mean))
