"""Slope and onset of every curve of a series."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from moegeom.core.series import Curve
from moegeom.core.text import number_of
from moegeom.geometry.trend import LEAST_STEPS, departures, onset, slope
from moegeom.kernels.quantities import NUM_BLOCKS
from moegeom.studies.track.curves import CHANCE, number

#: Slopes are per this many steps.
PER_STEPS = 1000.0

#: Probability that any router is given an onset by chance, for each figure.
LEVEL = 0.05

#: Figures of two steps. The overlap with the last grows towards the last by construction, and the
#: others compare neighbours: none of them has a first value to leave.
_OF_TWO_STEPS = ("overlap_with_last", "overlap_with_previous", "coalition_churn", CHANCE)


def with_trends(curves: Sequence[Curve], steps: Sequence[float]) -> tuple[Curve, ...]:
    """The curves with slope and onset; onsets by Holm's procedure over the routers of a figure."""
    axis = np.array(steps, dtype=np.float64)
    sloped = [_with_slope(curve, axis) for curve in curves]
    for column in dict.fromkeys(curve.column for curve in curves):
        if column not in _OF_TWO_STEPS:
            places = [i for i, curve in enumerate(sloped) if curve.column == column]
            for place, begin in zip(places, _onsets([sloped[i] for i in places]), strict=True):
                if begin is not None:
                    sloped[place] = dataclasses.replace(sloped[place], onset=float(axis[begin]))
    return tuple(sloped)


def _with_slope(curve: Curve, axis: np.ndarray) -> Curve:
    if curve.column == CHANCE:
        return curve
    trend = slope(axis, _array(curve.values), _array(curve.errors))
    return dataclasses.replace(
        curve,
        slope=number(trend.value * PER_STEPS),
        slope_half_width=number(trend.half_width * PER_STEPS),
    )


def _onsets(curves: Sequence[Curve]) -> list[int | None]:
    """Onset of each router: the i-th clearest of m is held to LEVEL / (m - i + 1)."""
    p_values = [
        departures(_array(curve.values), _array(curve.errors), NUM_BLOCKS - 1.0) for curve in curves
    ]
    found: list[int | None] = [None] * len(curves)
    order = sorted(range(len(curves)), key=lambda i: float(p_values[i].min()))
    for rank, index in enumerate(order):
        begin = onset(p_values[index], LEVEL / (len(curves) - rank))
        if begin is None:
            break
        found[index] = begin
    return found


def trend_notes(num_steps: int) -> list[str]:
    """What so few steps cannot tell."""
    if num_steps < 3:
        return ["Fewer than three steps: no scatter about a line, and no onset."]
    if num_steps < LEAST_STEPS:
        steps = number_of(num_steps, "step")
        return [f"{steps}: a slope, but no onset, which takes at least {LEAST_STEPS}."]
    return []


def _array(values: Sequence[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
