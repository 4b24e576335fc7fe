"""Chosen slots by block of documents and expert."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from moegeom.kernels.reduction import State, StateView


def _select(
    state: State, population: int | None, without: int | None
) -> Int64[np.ndarray, "blocks experts"]:
    """Blocks side by side, without the one that is left out."""
    counts = state["counts"]
    blocks = counts.sum(axis=0) if population is None else counts[population]
    return blocks if without is None else np.delete(blocks, without, axis=0)


VIEW = StateView("expert_counts_by_block", "expert_counts", _select)
