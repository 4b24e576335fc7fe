"""Logits by matrix products of fixed shape, so that batches cannot change a bit of them."""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Float
from moegeom.core.tokens import TILE


def tile_logits(
    values: Float[np.ndarray, "tokens hidden"],
    weight_columns: Float[np.ndarray, "hidden experts"],
    bias: Float[np.ndarray, "experts"] | None,
) -> Float[np.ndarray, "tokens experts"]:
    """Logits W y + b of tokens that begin on a tile border.

    One product per tile, the last one filled with zeros: each token meets the same
    product, of the same shape and at the same row, whatever batch it came in. The dtype is that of
    the weights (float32, or float64 where they are stored so), and so is the accumulation.
    """
    tokens = len(values)
    logits = np.empty((-(-tokens // TILE) * TILE, weight_columns.shape[1]), weight_columns.dtype)
    for start in range(0, tokens, TILE):
        tile = values[start : start + TILE]
        if len(tile) < TILE or tile.dtype != logits.dtype:
            padded = np.zeros((TILE, values.shape[1]), dtype=logits.dtype)
            padded[: len(tile)] = tile
            tile = padded
        np.matmul(tile, weight_columns, out=logits[start : start + TILE])
    if bias is not None:
        logits += bias
    return logits[:tokens]
