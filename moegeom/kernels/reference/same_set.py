"""Comparison of two choices."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int32


def same_set(
    chosen: Int32[np.ndarray, "tokens k"], recorded: Int32[np.ndarray, "tokens m"]
) -> Bool[np.ndarray, "tokens"]:
    """True where both rows hold the same set of experts, in whatever order."""
    if chosen.shape[1] != recorded.shape[1]:
        return np.zeros(len(chosen), dtype=bool)
    return (np.sort(chosen, axis=1) == np.sort(recorded, axis=1)).all(axis=1)
