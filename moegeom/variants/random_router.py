"""The random router: a random router of the same shape, row norms, biases and rule."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Float, Float64


def random_router(router: Router, seed: int) -> Router:
    """The router with each row replaced by a random direction of the same length.

    Rows are Gaussian directions; biases and rule stay. Near-boundary shares grow with the number
    of experts and with k, so a share means something only beside that of this router on the same
    tokens. The seed is mixed with the name: layers differ, runs agree.
    """
    rows = rows_in_random_directions(router.weight, f"{seed}:{router.name}")
    return dataclasses.replace(router, weight=rows.astype(router.weight.dtype))


def rows_in_random_directions(
    rows: Float[np.ndarray, "*shape width"], key: str
) -> Float64[np.ndarray, "*shape width"]:
    """Rows of the same lengths in Gaussian directions, the same for the same ``key`` and shape."""
    digest = hashlib.sha256(key.encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))
    directions = generator.standard_normal(rows.shape)
    lengths = np.linalg.norm(rows.astype(np.float64), axis=-1)
    directions *= (lengths / np.linalg.norm(directions, axis=-1))[..., None]
    return directions
