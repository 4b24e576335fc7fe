"""Choices under a limit: experts that choose tokens, and token choice with a capacity."""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64, Int32
from moegeom.geometry.load import expert_capacity


def batch_capacity(num_tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Tokens that an expert takes of a batch, ceil(f k T / E), never more than there are.

    Source: docs/theory.md D3, :func:`~moegeom.geometry.load.expert_capacity`.
    """
    if factor * k >= num_experts:
        return num_tokens
    return min(expert_capacity(num_tokens, num_experts, k, factor), num_tokens)


def _ranks(
    scores: Float64[np.ndarray, "tokens experts"],
) -> Float64[np.ndarray, "tokens experts"]:
    """Place of each token among those of an expert, 0 for the best; equal: the earlier token.

    inf for a score of -inf, which has no place.
    """
    order = np.argsort(-scores, axis=0, kind="stable")
    rank = np.empty(scores.shape)
    places = np.broadcast_to(np.arange(len(scores), dtype=np.float64)[:, None], scores.shape)
    np.put_along_axis(rank, order, places, axis=0)
    return np.where(np.isneginf(scores), np.inf, rank)


def expert_choice(
    scores: Float[np.ndarray, "tokens experts"], capacity: int
) -> Bool[np.ndarray, "tokens experts"]:
    """Each expert takes the ``capacity`` tokens that score highest with it, as a mask.

    Equal scores: the earlier token. -inf is never taken. A token may have none or all experts, and
    what it has depends on every other token. Source: docs/theory.md D3. Oracle in tests: torch.
    """
    return _ranks(scores.astype(np.float64)) < capacity


def kept_within_capacity(
    chosen: Int32[np.ndarray, "tokens k"],
    num_experts: int,
    capacity: int,
    scores: Float[np.ndarray, "tokens experts"] | None = None,
) -> Bool[np.ndarray, "tokens k"]:
    """Which choices an expert with room for ``capacity`` tokens serves.

    The first ones in the order of tokens; with ``scores`` those that score highest with it, the
    earlier token among equals. By order what happens to a token depends on earlier ones alone.
    Slots of -1 are not kept. The others are dropped, sum of max(0, c_e - C) in all.
    Source: docs/theory.md D3. Oracle in tests: tokens served one at a time.
    """
    token, slot = np.nonzero(chosen >= 0)
    expert = chosen[token, slot]
    wish = np.full((len(chosen), num_experts), -np.inf)
    wish[token, expert] = 0.0 if scores is None else scores[token, expert]
    is_served = np.zeros(chosen.shape, dtype=bool)
    is_served[token, slot] = (_ranks(wish) < capacity)[token, expert]
    return is_served
