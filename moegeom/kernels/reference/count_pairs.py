"""Counts by pair of experts."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32, Int64


def count_pairs(
    counts: Int64[np.ndarray, "blocks experts experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    block: Int32[np.ndarray, "tokens"],
) -> None:
    """Adds 1 at (block, i, j) for each two slots of a token with i <= j; -1 is an empty slot."""
    for token in range(len(chosen)):
        experts = np.sort(chosen[token][chosen[token] >= 0])
        first, second = np.triu_indices(len(experts))
        np.add.at(counts[block[token]], (experts[first], experts[second]), 1)
