"""Which tokens a variant flips: a bit for each, so that layers can be joined on the token."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State, Use


class _Bits:
    def __init__(self, extent: Extent) -> None:
        size = -(-extent.num_tokens // 8)
        self._flipped, self._seen = np.zeros((2, size), np.uint8)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        assert batch.flip is not None
        _set(self._seen, batch.token)
        _set(self._flipped, batch.token[batch.flip.differs])

    def state(self) -> State:
        return {"flipped": self._flipped, "seen": self._seen}


def _set(bits: np.ndarray, token: np.ndarray) -> None:
    np.bitwise_or.at(bits, token >> 3, (1 << (token & 7)).astype(np.uint8))


def _select(state: State, population: int | None, without: int | None) -> State:
    """Bits are kept for the whole: nothing is known of a part of it."""
    if population is None and without is None:
        return state
    return {name: np.zeros_like(bits) for name, bits in state.items()}


REDUCTION = Reduction(
    name="flip_bits",
    needs=("flip",),
    start=_Bits,
    merge=lambda first, second: {name: first[name] | second[name] for name in first},
    select=_select,
    use=Use(of_flip=True, of_random_flip=True),
)
