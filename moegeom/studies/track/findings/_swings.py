"""States that swing from one step to the next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from moegeom.geometry.series import alternation_p_value, least_alternation_p_value, main_scores

#: Steps of the shortest stretch that is looked at.
_SHORTEST = 8

#: Share of the swings of its first half that those of its last half must have: others die down.
_LASTING = 0.7


@dataclass(frozen=True)
class Swing:
    """The stretch from step ``onset`` to the end that alternates most, and what it may be chance.

    ``p_value`` is that of all stretches together, ``num_crossings`` of ``num_places`` steps cross
    the mean; ``expert`` swings most, by ``size`` from step to step. ``is_lasting`` is false where
    the swings die down.
    """

    onset: int
    p_value: float
    num_crossings: int
    num_places: int
    expert: int
    size: float
    is_lasting: bool


def swing(states: Float64[np.ndarray, "steps experts"]) -> Swing:
    """How far the states alternate about their mean, along the direction of their largest scatter.

    Every stretch of 8 steps at least that lasts to the end is looked at; there must be one.
    """
    starts = range(len(states) - _SHORTEST + 1)
    scores = [main_scores(states[start:]) for start in starts]
    p_values = [alternation_p_value(one > 0.0) for one in scores]
    onset = int(np.argmin(p_values))
    found, part = scores[onset], states[onset:]
    sizes = np.abs(np.diff(found))
    half = len(sizes) // 2
    by_expert = np.abs(np.diff(part, axis=0)).mean(axis=0)
    expert = int(by_expert.argmax())
    return Swing(
        onset,
        min(1.0, p_values[onset] * len(starts)),
        int(((found[1:] > 0.0) != (found[:-1] > 0.0)).sum()),
        len(sizes),
        expert,
        float(by_expert[expert]),
        float(sizes[-half:].mean()) >= _LASTING * float(sizes[:half].mean()),
    )


def least_swing(steps: int) -> float:
    """The least p-value that so many steps can have; 1 where they are too few."""
    if steps < _SHORTEST:
        return 1.0
    return least_alternation_p_value(steps) * (steps - _SHORTEST + 1)
