"""How many distinct chosen sets were seen, and how many probably were not."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64


def good_turing_coverage(counts: Int64[np.ndarray, "expert_sets"]) -> float:
    """Estimated share of future tokens whose expert set was already seen, 1 - f1 / T.

    f1 expert sets were seen once, T tokens in all; nan without tokens. Source: docs/theory.md B4.
    """
    total = int(counts.sum())
    return float("nan") if total == 0 else 1.0 - int((counts == 1).sum()) / total


def chao1(counts: Int64[np.ndarray, "expert_sets"]) -> float:
    """Lower estimate of the number of expert sets, S + f1 (f1 - 1) / (2 (f2 + 1)).

    The bias-corrected form, finite without any expert set seen twice. Source: docs/theory.md B4.
    """
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return len(counts) + once * (once - 1) / (2.0 * (twice + 1))


def expert_set_entropy_nats(counts: Int64[np.ndarray, "expert_sets"]) -> float:
    """Entropy of the expert set distribution with the Miller-Madow correction, in nats.

    Plug-in entropy plus (S - 1) / (2 T). nan without tokens. Source: docs/theory.md B4; oracle:
    scipy.stats.entropy.
    """
    total = int(counts.sum())
    if total == 0:
        return float("nan")
    share = counts[counts > 0] / total
    return float(-(share * np.log(share)).sum() + (len(share) - 1) / (2.0 * total))


def rarefied(
    counts: Int64[np.ndarray, "expert_sets"], num_tokens: Int64[np.ndarray, "sizes"]
) -> Float64[np.ndarray, "sizes"]:
    r"""Expected number of distinct expert sets among n tokens drawn without replacement.

    :math:`S - \sum_i \binom{T - n_i}{n} / \binom{T}{n}`: what a shorter stream of such tokens would
    have shown, so that streams of different length can be compared. S for n = T, nan for n > T.
    Relative error 1e-9 (logarithms of binomials). Source: Hurlbert 1971; oracle: Monte Carlo and
    exact rational sums.
    """
    from scipy.special import gammaln

    total = int(counts.sum())
    size, multiplicity = np.unique(counts[counts > 0], return_counts=True)
    n = num_tokens[:, None].astype(np.float64)
    rest = total - size[None, :] - n  # tokens of other expert sets less those drawn
    possible = rest >= 0
    rest = np.where(possible, rest, 0.0)
    left = np.where(n <= total, total - n, 0.0)
    log_missed = gammaln(total - size + 1.0) - gammaln(rest + 1.0)
    log_missed += gammaln(left + 1.0) - gammaln(total + 1.0)
    missed = np.where(possible, np.exp(np.minimum(log_missed, 0.0)), 0.0)
    expected = (multiplicity * (1.0 - missed)).sum(axis=1)
    return np.where(num_tokens <= total, expected, np.nan)
