"""How alike the outputs of several experts on one token are, and how far they add up."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float32, Float64, Integer


def mean_pair_cosine(
    outputs: Float[np.ndarray, "tokens slots width"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Mean cosine of two outputs of one token, over its pairs.

    Of m outputs with unit vectors u: :math:`(|\sum u|^2 - m) / (m (m - 1))`, -1/(m-1) to 1. Outputs
    of 0 have no direction and are left out; nan where fewer than two are left.
    Oracle in tests: sklearn.metrics.pairwise.cosine_similarity.
    """
    found = np.full(len(outputs), np.nan)
    for token, rows in enumerate(outputs):
        rows = rows.astype(np.float64)
        length = np.sqrt((rows**2).sum(axis=1))
        rows = rows[length > 0.0] / length[length > 0.0, None]
        if (m := len(rows)) > 1:
            found[token] = (float((rows.sum(axis=0) ** 2).sum()) - m) / (m * (m - 1))
    return found


def centred_by_expert(
    outputs: Float32[np.ndarray, "tokens slots width"],
    experts: Integer[np.ndarray, "tokens slots"],
) -> Float32[np.ndarray, "tokens slots width"]:
    """Outputs less the mean output of the same expert over its tokens; 0 for its only one.

    Oracle in tests: a loop over experts.
    """
    left = np.zeros_like(outputs)
    for expert in np.unique(experts):
        token, slot = np.nonzero(experts == expert)
        rows = outputs[token, slot]
        if len(rows) > 1:
            left[token, slot] = rows - rows.mean(axis=0, dtype=np.float64)
    return left


def adding_up(
    contributions: Float[np.ndarray, "tokens slots width"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Length of the sum over the sum of the lengths, :math:`|\sum c_i| / \sum |c_i|`.

    1 where all point the same way, :math:`k^{-1/2}` for k orthogonal ones of one length, 0 where
    they cancel; nan where all are 0. Oracle in tests: vectors worked out by hand.
    """
    total = np.linalg.norm(contributions.sum(axis=1, dtype=np.float64), axis=1)
    lengths = np.linalg.norm(contributions.astype(np.float64), axis=2).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return total / lengths
