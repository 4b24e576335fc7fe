"""Tokens of a batch whose successor in the document is in the batch too."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from moegeom.core.tokens import TILE
from moegeom.kernels.batch import TokenBatch


def first_of_pairs(batch: TokenBatch) -> Int64[np.ndarray, "pairs"]:
    """Rows whose next row is the next position of the same document.

    A pair counts only within one tile: batches are made of whole tiles, so how they are cut cannot
    change which pairs count. One pair in 1024 is lost.
    """
    q = batch
    assert q.document is not None and q.position is not None
    follows = (q.document[1:] == q.document[:-1]) & (q.document[1:] >= 0)
    follows &= q.position[1:] == q.position[:-1] + 1
    follows &= q.token[1:] // TILE == q.token[:-1] // TILE
    return np.flatnonzero(follows)
