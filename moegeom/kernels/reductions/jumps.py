"""Jumps of the output at the nearest boundary, of the tokens whose experts were applied."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State
from moegeom.kernels.reductions.samples import TokenSample, joined, rows_of

#: Columns that are kept of each token, beside its labels.
_COLUMNS = ("height", "relative", "chance")


class _Jumps(TokenSample):
    """The tokens were chosen before their experts were applied: all of them are kept."""

    def __init__(self, extent: Extent) -> None:
        labels = np.empty(0, dtype=np.int32)
        empty = {
            **dict.fromkeys(("population", "block"), labels),
            **dict.fromkeys(_COLUMNS, np.empty(0)),
            "pair": np.empty((0, 2), dtype=np.int32),
        }
        super().__init__(1, 1, empty)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        assert batch.jumps is not None
        columns = {name: getattr(batch.jumps, name) for name in (*_COLUMNS, "pair")}
        self.add(batch.token, {"population": batch.population, "block": batch.block, **columns})


def _select(state: State, population: int | None, without: int | None) -> State:
    row = rows_of(state, population, without)
    return {name: state[name][row] for name in (*_COLUMNS, "pair")}


def _kept(name: str) -> Reduction:
    return Reduction(
        name=name,
        needs=("jumps",),
        start=_Jumps,
        merge=lambda first, second: joined([first, second]),
        select=_select,
    )


#: Jumps of a sample of the tokens.
JUMPS = _kept("jumps")

#: Jumps of tokens that a variant flips.
FLIP_JUMPS = _kept("flip_jumps")
