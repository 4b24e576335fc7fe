"""How many distinct chosen sets were seen, and how many probably were not."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64


def good_turing_coverage(counts: Int64[np.ndarray, "coalitions"]) -> float:
    """Estimated share of future tokens whose coalition was already seen, 1 - f1 / T.

    f1 coalitions were seen once, T tokens in all; nan without tokens. Source: THEORY.md B4.
    """
    total = int(counts.sum())
    return float("nan") if total == 0 else 1.0 - int((counts == 1).sum()) / total


def chao1(counts: Int64[np.ndarray, "coalitions"]) -> float:
    """Lower estimate of the number of coalitions, S + f1 (f1 - 1) / (2 (f2 + 1)).

    The bias-corrected form, finite without any coalition seen twice. Source: THEORY.md B4.
    """
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return len(counts) + once * (once - 1) / (2.0 * (twice + 1))


def coalition_entropy_nats(counts: Int64[np.ndarray, "coalitions"]) -> float:
    """Entropy of the coalition distribution with the Miller-Madow correction, in nats.

    Plug-in entropy plus (S - 1) / (2 T). nan without tokens. Source: THEORY.md B4; oracle:
    scipy.stats.entropy.
    """
    total = int(counts.sum())
    if total == 0:
        return float("nan")
    share = counts[counts > 0] / total
    return float(-(share * np.log(share)).sum() + (len(share) - 1) / (2.0 * total))
