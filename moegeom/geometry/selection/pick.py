"""Picks: which experts are chosen, and by how much."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32


def top_k(selection: Float[np.ndarray, "tokens experts"], k: int) -> Int32[np.ndarray, "tokens k"]:
    """The k largest selection scores of each token, descending; equal scores: the lower index.

    Source: S0 Definition A.4. Oracle in tests: torch.topk wherever no two scores are equal.
    """
    order = np.argsort(-selection, axis=1, kind="stable")[:, :k]
    return order.astype(np.int32)


def margin(selection: Float[np.ndarray, "tokens experts"], k: int) -> Float64[np.ndarray, "tokens"]:
    """The k-th largest selection score minus the (k+1)-th; inf when k is the number of experts.

    Zero exactly on a tie across the border of the chosen set; ties inside it do not count.
    Masked experts at -inf give inf when fewer than k+1 experts are allowed.
    Source: docs/theory.md A2 (`gap` = `tie_spread(1)`).
    """
    if k == selection.shape[1]:
        return np.full(selection.shape[0], np.inf)
    descending = -np.sort(-selection.astype(np.float64), axis=1)
    # inf - inf would be nan: two masked scores do not compete for a place.
    kth, following = descending[:, k - 1], descending[:, k]
    return np.where(np.isneginf(following), np.inf, kth - np.maximum(following, -1e308))
