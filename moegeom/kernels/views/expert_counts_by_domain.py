"""Chosen slots by population and expert."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from moegeom.kernels.reduction import State, StateView


def _select(
    state: State, population: int | None, without: int | None
) -> Int64[np.ndarray, "populations experts"]:
    """All populations side by side; for a single population only its own row."""
    counts = state["counts"]
    total = counts.sum(axis=1)
    if without is not None:
        total = total - counts[:, without]
    return total if population is None else total[population][None]


VIEW = StateView("expert_counts_by_domain", "expert_counts", _select)
