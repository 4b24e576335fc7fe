"""Router inputs of a sample of the tokens, outlier tokens left out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from moegeom.geometry.gram.second_moments import BlockedMoments, Moments, blocked_moments
from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State, Use
from moegeom.kernels.reductions._sample import TokenSample, joined

#: Tokens kept, about, and bytes at most: the table of their distances costs tokens^2 x hidden size.
SIZE = 2048
_BYTES = 32 * 2**20


def sample_size(hidden_size: int) -> int:
    """Tokens kept, about, for inputs of this size."""
    return int(min(SIZE, max(_BYTES // (4 * hidden_size), 64)))


class _Sample(TokenSample):
    def __init__(self, extent: Extent) -> None:
        empty = {
            "block": np.empty(0, dtype=np.int32),
            "input": np.empty((0, extent.hidden_size), dtype=np.float32),
        }
        super().__init__(sample_size(extent.hidden_size), extent.num_tokens, empty)
        self._outliers = extent.num_populations - 1

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        q = batch
        assert q.input is not None
        row = self.wanted(q.token)
        row = row[q.population[row] != self._outliers]
        columns = {"block": q.block[row], "input": q.input[row].astype(np.float32)}
        self.add(q.token[row], columns)


@dataclass(frozen=True, eq=False)
class InputSample:
    """What metrics see of the sample: its moments, and the inputs themselves."""

    moments: Moments
    inputs: Float32[np.ndarray, "tokens hidden"]


@dataclass(frozen=True, eq=False)
class _Settled:
    inputs: np.ndarray
    block: np.ndarray
    moments: BlockedMoments


def _settle(state: State) -> _Settled:
    """Moments by block: every selection is cut from one table of products."""
    inputs = state["input"]
    moments = blocked_moments(inputs.astype(np.float64), state["block"], NUM_BLOCKS)
    return _Settled(inputs, state["block"], moments)


def _select(settled: _Settled, population: int | None, without: int | None) -> InputSample:
    """The sample without one block; empty for a domain."""
    kept = np.full(NUM_BLOCKS, population is None)
    if without is not None:
        kept[without] = False
    inputs = settled.inputs if kept.all() else settled.inputs[kept[settled.block]]
    return InputSample(settled.moments.of_blocks(kept), inputs)


REDUCTION = Reduction(
    name="input_sample",
    needs=("input",),
    start=_Sample,
    merge=lambda first, second: joined([first, second]),
    select=_select,
    settle=_settle,
    use=Use(of_random_router=False),
)
