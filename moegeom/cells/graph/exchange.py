"""Which experts change places at a wall."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int16, Int64


def exchanged(
    coalition: Int16[np.ndarray, "cells k"], walls: Int64[np.ndarray, "walls 2"]
) -> tuple[Int64[np.ndarray, "walls"], Int64[np.ndarray, "walls"]]:
    """The first expert that only a wall's first cell has, and the first that only its second has.

    The only ones but where several pairs tie on one hyperplane.
    """
    rows = coalition.astype(np.int64)
    members = np.zeros((len(rows), int(rows.max(initial=0)) + 1), dtype=bool)
    members[np.arange(len(rows))[:, None], rows] = True
    first, second = members[walls[:, 0]], members[walls[:, 1]]
    return (first & ~second).argmax(axis=1), (second & ~first).argmax(axis=1)
