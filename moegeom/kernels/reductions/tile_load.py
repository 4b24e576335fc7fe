"""Largest load of an expert in each tile of 1024 tokens, as in one batch of training."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from moegeom.core.tokens import TILE
from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State

#: Shares are summed as integers of 2^-40.
FIXED_POINT = 2.0**40

#: A tile with fewer tokens is left out: its largest load would be higher by chance.
LEAST_TOKENS = TILE // 2

#: Columns of the counters: tiles, sum of the largest share of slots that an expert has in a tile.
TILES, LARGEST = range(2)


class _Tiles:
    """Blocks only, by the first token of a tile: tiles hold several domains."""

    def __init__(self, extent: Extent) -> None:
        self._counts = np.zeros((NUM_BLOCKS, 2), dtype=np.int64)
        self._experts = extent.num_experts

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        tile = batch.token // TILE
        borders = [*np.flatnonzero(np.diff(tile, prepend=-1)).tolist(), len(tile)]
        for start, stop in pairwise(borders):
            if stop - start < LEAST_TOKENS:
                continue
            chosen = batch.chosen[start:stop]
            counts = np.bincount(chosen[chosen >= 0], minlength=self._experts)
            share = np.rint(counts.max() / max(counts.sum(), 1) * FIXED_POINT)
            block = batch.block[start]
            self._counts[block, TILES] += 1
            self._counts[block, LARGEST] += np.int64(share)

    def state(self) -> State:
        return {"counts": self._counts}


def _select(state: State, population: int | None, without: int | None) -> tuple[int, float]:
    """Number of tiles and sum of the largest shares; no tile for a single population."""
    if population is not None:
        return 0, 0.0
    counts = state["counts"].sum(axis=0)
    if without is not None:
        counts = counts - state["counts"][without]
    return int(counts[TILES]), float(counts[LARGEST]) / FIXED_POINT


REDUCTION = Reduction(
    name="tile_load",
    needs=("chosen",),
    start=_Tiles,
    merge=lambda first, second: {"counts": first["counts"] + second["counts"]},
    select=_select,
)
