"""How evenly experts are used: one function per quantity, each vectorised over leading axes."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

#: One number per vector of counts: a NumPy scalar when there is only one vector.
PerVector = Float64[np.ndarray, "*batch"] | np.float64

#: An expert below this share of its fair load is starved (THEORY.md D3, there "dead").
STARVED_BELOW = 0.1


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

    ``ddof`` 0 is the population value; both occur in practice. Source: THEORY.md D3; oracle:
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


def starved_share(counts: Int64[np.ndarray, "*batch experts"]) -> PerVector:
    """Share of experts with less than a tenth of the fair load, dead ones included."""
    share = load_share(counts)
    starved = (share < STARVED_BELOW).mean(axis=-1)
    return np.where(np.isnan(_fair(counts)[..., 0]), np.nan, starved)


def load_cv_floor(num_tokens: int, num_experts: int, top_k: int) -> float:
    r"""CV that perfectly even random routing shows on this many independent tokens.

    :math:`\sqrt{(1 - k/E) / m}` with m = kT/E tokens per expert. Real tokens are not independent,
    so a balanced router shows more (NEEDS.md section 3). nan without tokens.
    Source: THEORY.md D3; oracle: Monte Carlo.
    """
    if num_tokens == 0:
        return float("nan")
    mean = top_k * num_tokens / num_experts
    return float(np.sqrt((1.0 - top_k / num_experts) / mean))
