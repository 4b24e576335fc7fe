"""Ranks that take tokens in turn: the number of a token modulo the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float64

from moegeom.studies.faults.scope import Scope, TokenRegion, Where, listed, sums

#: Numbers of ranks that are tried.
_MOST = 16


def _in_turn(
    saved: Float64[np.ndarray, "tokens"], number: np.ndarray, what: str
) -> Iterator[TokenRegion]:
    for count in range(2, _MOST + 1):
        group = np.where(number >= 0, number % count, -1)
        of_each = np.append(sums(saved, group), np.zeros(count))[:count]
        is_chosen = of_each > 0.0
        chosen = np.flatnonzero(is_chosen)
        if 0 < len(chosen) < count:
            inside = is_chosen[group] & (group >= 0)
            text = f"{what} {listed(chosen)} modulo {count}"
            yield TokenRegion(inside, text, math.log2(_MOST) + count)


def _ranks(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    yield from _in_turn(saved, where.number, "tokens")


RANKS = Scope("ranks", _ranks)


def _turns(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    yield from _in_turn(saved, where.position, "positions")


TURNS = Scope("turns", _turns)


def _requests(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    yield from _in_turn(saved, where.document, "documents")


REQUESTS = Scope("requests", _requests)
