"""Ranks that take tokens in turn: the number of a token modulo the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.studies.faults.scope import Scope, TokenRegion, Where, listed, sums

#: Numbers of ranks that are tried.
_MOST = 16


def _in_turn(
    saved: Float64[np.ndarray, "tokens"], where: Where, kind: str
) -> Iterator[TokenRegion]:
    for count in range(2, _MOST + 1):
        group = where.turn(kind, count)
        of_each = np.append(sums(saved, group), np.zeros(count))[:count]
        is_chosen = of_each > 0.0
        chosen = np.flatnonzero(is_chosen)
        if 0 < len(chosen) < count:
            # the place behind the last is that of -1
            inside = np.append(is_chosen, False)[group]
            text = f"{_WORDS[kind]} {listed(chosen)} modulo {count}"
            yield TokenRegion(inside, text, math.log2(_MOST) + count)


#: What a number is of, by the name that :class:`Where` has for it.
_WORDS = {"number": "tokens", "position": "positions", "document": "documents"}


def _ranks(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    yield from _in_turn(saved, where, "number")


RANKS = Scope("ranks", _ranks)


def _turns(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    yield from _in_turn(saved, where, "position")


TURNS = Scope("turns", _turns)


def _requests(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    yield from _in_turn(saved, where, "document")


REQUESTS = Scope("requests", _requests)
