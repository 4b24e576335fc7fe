"""How many experts two choices have in common."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32, Int64


def num_shared(
    first: Int32[np.ndarray, "tokens k"], second: Int32[np.ndarray, "tokens m"]
) -> Int64[np.ndarray, "tokens"]:
    """Size of the intersection of each two rows, whatever their order; -1 is an empty slot."""
    equal = (first[:, :, None] == second[:, None, :]) & (first[:, :, None] >= 0)
    return equal.sum(axis=(1, 2))
