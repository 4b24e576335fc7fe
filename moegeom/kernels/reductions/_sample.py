"""A sample of the tokens of a stream: those whose number has a small enough hash.

How small is fixed by the length of the stream, so that every token is decided by itself: samples of
parts join into that of the whole, however it was cut, and memory does not grow with the stream.
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
    """About ``size`` of ``num_tokens`` tokens, and columns about them; all when there are fewer."""

    def __init__(self, size: int, num_tokens: int, empty: State) -> None:
        share = min(size / max(num_tokens, 1), 1.0)
        self._largest = np.uint64(min(int(share * 2.0**64), 2**64 - 1))
        self._parts: list[State] = [{"key": np.empty(0, dtype=np.uint64), **empty}]

    def wanted(self, token: Int64[np.ndarray, "tokens"]) -> Int64[np.ndarray, "kept"]:
        """Rows that belong to the sample."""
        return np.flatnonzero(token_hash(token) <= self._largest)

    def add(self, token: Int64[np.ndarray, "kept"], columns: State) -> None:
        """Takes in rows that :meth:`wanted` named."""
        self._parts.append({"key": token_hash(token), **columns})

    def state(self) -> State:
        """Columns in ascending order of the hash, which is ``key``."""
        self._parts = [joined(self._parts)]
        return self._parts[0]


def joined(states: list[State]) -> State:
    """The rows of several states in ascending order of their keys."""
    order = np.argsort(np.concatenate([state["key"] for state in states]))
    return {name: np.concatenate([state[name] for state in states])[order] for name in states[0]}


def rows_of(state: State, population: int | None, without: int | None) -> Int64[np.ndarray, "rows"]:
    """Rows of one population (all of them for None), less those of one block."""
    kept = np.ones(len(state["block"]), dtype=bool)
    if population is not None:
        kept &= state["population"] == population
    if without is not None:
        kept &= state["block"] != without
    return np.flatnonzero(kept)
