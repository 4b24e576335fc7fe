"""Counts by expert."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32, Int64


def count_experts(
    counts: Int64[np.ndarray, "populations blocks experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    population: Int32[np.ndarray, "tokens"],
    block: Int32[np.ndarray, "tokens"],
) -> None:
    """Adds 1 at (population, block, expert) for each chosen slot; -1 is an empty slot."""
    token, slot = np.nonzero(chosen >= 0)
    np.add.at(counts, (population[token], block[token], chosen[token, slot]), 1)
