"""Does the recorded choice agree with the choice recomputed here."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State, Use, select_counts

#: Columns of the counter array. ``near_tie`` differs, but within the float bound of a tie.
EQUAL, NEAR_TIE, BEYOND = range(3)

#: Disagreeing tokens that are listed, the first ones of the stream.
NUM_LISTED = 64


class _Agreement:
    def __init__(self, extent: Extent) -> None:
        self._counts = extent.zeros(3)
        self._token = np.empty(0, dtype=np.int64)
        self._margin = np.empty(0)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        matches, effective_margin = batch.matches_recording, batch.effective_margin
        assert matches is not None and effective_margin is not None
        bound = 0.0 if batch.float_bound is None else batch.float_bound
        outcome = np.where(matches, EQUAL, np.where(effective_margin <= bound, NEAR_TIE, BEYOND))
        np.add.at(self._counts, (batch.population, batch.block, outcome), 1)
        differing = np.flatnonzero(~matches)
        if differing.size:
            self._token, self._margin = _first(
                np.append(self._token, batch.token[differing]),
                np.append(self._margin, effective_margin[differing]),
            )

    def state(self) -> State:
        return {"counts": self._counts, "token": self._token, "margin": self._margin}


def _first(token: np.ndarray, margin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(token, kind="stable")[:NUM_LISTED]
    return token[order], margin[order]


def _merge(first: State, second: State) -> State:
    token, margin = _first(
        np.append(first["token"], second["token"]), np.append(first["margin"], second["margin"])
    )
    return {"counts": first["counts"] + second["counts"], "token": token, "margin": margin}


REDUCTION = Reduction(
    name="agreement",
    needs=("matches_recording", "margin"),
    start=_Agreement,
    merge=_merge,
    select=lambda state, population, without: select_counts(state["counts"], population, without),
    use=Use(of_random_router=False),
)
