"""Routers that stand still while others move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

#: A router moves at all from this relative change on: writing it again in bfloat16 moves it by
#: 0.0018.
MOVES = 0.003

#: Share of the rate of those that move up to which one stands still. Rates of routers of one run
#: differ by a small factor; heuristic.
STANDS = 0.01


@dataclass(frozen=True)
class Standing:
    """A router that stands still from step ``onset`` to the end.

    ``own`` and ``others`` are median rates from there on, ``others`` those of the ``num_moving``
    routers that move.
    """

    router: str
    onset: int
    own: float
    others: float
    num_moving: int


def standing(
    rates: Mapping[str, Float64[np.ndarray, "intervals"]], least: int = 1
) -> Iterator[Standing]:
    """Routers that stand still for ``least`` intervals or more up to the end, while others move.

    Only intervals count in which more than half of the others move, so that a run that is over has
    none, and one router that runs away does not make the others look still.
    """
    if len(rates) < 2:
        return
    table = np.stack(list(rates.values()))
    moves = table >= MOVES
    counted = np.flatnonzero(moves.sum(axis=0) > (len(table) - 1) / 2.0)
    if not len(counted):
        return
    usual = np.array([np.median(table[moves[:, at], at]) for at in counted])
    for router, rate in zip(rates, table, strict=True):
        is_above = rate[counted] > STANDS * usual
        begin = int(np.flatnonzero(is_above)[-1]) + 1 if is_above.any() else 0
        if len(counted) - begin >= least:
            behind = counted[begin:]
            number = int(moves[:, behind].any(axis=1).sum())
            own, others = (float(np.median(part)) for part in (rate[behind], usual[begin:]))
            yield Standing(router, int(behind[0]), own, others, number)
