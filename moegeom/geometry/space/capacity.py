"""Capacity of experts and ranks at given loads."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from jaxtyping import Int64


def expert_capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Tokens that an expert may take, ceil(f k T / E).

    In fractions, with the factor as people write it: 1.1 is 11/10, so that 1.1 times 10 is 11 and
    not, by the rounding of 1.1 to a float, 12. Source: docs/theory.md D3.
    """
    return math.ceil(Fraction(repr(float(factor))) * top_k * num_tokens / num_experts)


def dropped_slot_share(counts: Int64[np.ndarray, "experts"], capacity: int) -> float:
    r"""Share of slots over the capacity of their expert, sum max(0, c_e - C) / sum c; nan without.

    Source: docs/theory.md D3.
    """
    total = int(counts.sum())
    return float(np.maximum(counts - capacity, 0).sum() / total) if total else float("nan")


def rank_imbalance(counts: Int64[np.ndarray, "experts"], num_ranks: int) -> float:
    """Largest load of equal groups of consecutive experts over their mean; 1 to ``num_ranks``.

    nan without tokens, and when ``num_ranks`` does not divide the number of experts.
    """
    if len(counts) % num_ranks:
        return float("nan")
    load = counts.reshape(num_ranks, -1).sum(axis=1)
    return float(load.max() / load.mean()) if load.any() else float("nan")
