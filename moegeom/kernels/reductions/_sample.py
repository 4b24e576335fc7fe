"""A sample of the tokens of a stream: those with the smallest hashes of their number.

Which tokens those are depends on the stream alone, so samples of parts merge into that of the
whole, however it was cut, and memory does not grow with the stream.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64, UInt64

from moegeom.kernels.reduction import State


def token_hash(token: Int64[np.ndarray, "tokens"]) -> UInt64[np.ndarray, "tokens"]:
    """A number for each token that looks random and differs from that of every other token.

    The finaliser of SplitMix64, which is one to one. Source: Steele, Lea and Flood 2014.
    """
    mixed = token.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class TokenSample:
    """The ``size`` tokens with the smallest hashes, and columns about them."""

    def __init__(self, size: int, empty: State) -> None:
        self._size = size
        self._state = {"key": np.empty(0, dtype=np.uint64), **empty}
        self._pending: list[State] = []
        self._waiting = 0

    def wanted(self, token: Int64[np.ndarray, "tokens"]) -> Int64[np.ndarray, "kept"]:
        """Rows that may belong to the sample."""
        key = token_hash(token)
        kept = self._state["key"]
        if len(kept) < self._size:
            return np.arange(len(token))
        return np.flatnonzero(key < kept[-1])

    def add(self, token: Int64[np.ndarray, "kept"], columns: State) -> None:
        """Takes in rows that :meth:`wanted` named."""
        if not len(token):
            return
        self._pending.append({"key": token_hash(token), **columns})
        self._waiting += len(token)
        if self._waiting >= self._size // 2:
            self._settle()

    def _settle(self) -> None:
        if self._pending:
            self._state = smallest([self._state, *self._pending], self._size)
        self._pending, self._waiting = [], 0

    def state(self) -> State:
        """Columns in ascending order of the hash, which is ``key``."""
        self._settle()
        return self._state


def smallest(states: list[State], size: int) -> State:
    """The rows with the ``size`` smallest keys of several states."""
    key = np.concatenate([state["key"] for state in states])
    order = np.argsort(key)[:size]
    return {name: np.concatenate([state[name] for state in states])[order] for name in states[0]}


def rows_of(state: State, population: int | None, without: int | None) -> Int64[np.ndarray, "rows"]:
    """Rows of one population (all of them for None), less those of one block."""
    kept = np.ones(len(state["block"]), dtype=bool)
    if population is not None:
        kept &= state["population"] == population
    if without is not None:
        kept &= state["block"] != without
    return np.flatnonzero(kept)
