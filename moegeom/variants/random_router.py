"""The random router: a random router of the same shape, row norms, biases and rule."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from moegeom.core.router import Router


def random_router(router: Router, seed: int) -> Router:
    """The router with each row replaced by a random direction of the same length.

    Rows are Gaussian directions; biases and rule stay. Near-boundary shares grow with the number
    of experts and with k, so a share means something only beside that of this router on the same
    tokens. The seed is mixed with the name: layers differ, runs agree.
    """
    digest = hashlib.sha256(f"{seed}:{router.name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))
    rows = generator.standard_normal(router.weight.shape)
    lengths = np.linalg.norm(router.weight.astype(np.float64), axis=1)
    rows *= (lengths / np.linalg.norm(rows, axis=1))[:, None]
    return dataclasses.replace(router, weight=rows.astype(router.weight.dtype))
