"""Outputs of the shared and the routed experts beside the router inputs, of a sample of tokens."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State, Use
from moegeom.kernels.reductions._sample import TokenSample, joined, rows_of
from moegeom.kernels.reductions.input_sample import sample_size


class _Sample(TokenSample):
    def __init__(self, extent: Extent) -> None:
        empty = np.empty((0, extent.hidden_size), dtype=np.float32)
        names = ("input", "shared", "routed")
        columns = {"block": np.empty(0, dtype=np.int32), **dict.fromkeys(names, empty)}
        super().__init__(sample_size(3 * extent.hidden_size), extent.num_tokens, columns)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        q = batch
        assert q.input is not None and q.shared_output is not None and q.routed_output is not None
        row = self.wanted(q.token)
        columns = {
            "block": q.block[row],
            "input": q.input[row].astype(np.float32),
            "shared": q.shared_output[row],
            "routed": q.routed_output[row],
        }
        self.add(q.token[row], columns)


def _select(state: State, population: int | None, without: int | None) -> dict[str, np.ndarray]:
    """The sample without one block; empty for a domain, which is too small to fit a map on."""
    kept = rows_of(state, None, without) if population is None else np.empty(0, dtype=np.intp)
    return {name: state[name][kept] for name in ("block", "input", "shared", "routed")}


REDUCTION = Reduction(
    name="block_outputs",
    needs=("input", "shared_output", "routed_output"),
    start=_Sample,
    merge=lambda first, second: joined([first, second]),
    select=_select,
    use=Use(of_random_router=False),
)
