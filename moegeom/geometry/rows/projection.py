"""A short signature of rows that keeps their distances, for baselines."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Float64

_SEED = 20_261_120


@lru_cache(maxsize=4)
def projection_matrix(dimension: int, count: int) -> Float64[np.ndarray, "dimension count"]:
    """Independent normal numbers of variance 1 / count; the same for every run and machine."""
    generator = np.random.Generator(np.random.PCG64([_SEED, dimension, count]))
    return generator.standard_normal((dimension, count)) / np.sqrt(count)


def projected(
    rows: Float64[np.ndarray, "rows dimension"], count: int
) -> Float64[np.ndarray, "rows count"]:
    r"""``count`` seeded projections of each row, :math:`x R`.

    :math:`|xR - yR| / |x - y|` has mean square 1 and standard deviation about 1 / sqrt(2 count):
    12 % for 32. Linear, so that centring can come before or after. Johnson and Lindenstrauss 1984.
    """
    return rows @ projection_matrix(rows.shape[1], count)
