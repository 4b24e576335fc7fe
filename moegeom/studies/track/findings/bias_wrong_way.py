"""MGT203: the selection bias does not rise for experts that have too much load.

Looked for: the correlation of ranks between the load of the experts at a step and the change of
their biases up to the next, over every stretch of two intervals at least up to the last step. Its
chance level is that of experts numbered at random, the same at all steps; the stretches are
counted. Told only where the load is at the end no more even than where the stretch begins.

A finding means: the update of the bias has the wrong sign, or its loads and its experts are in
another order: it drives loads apart. On text unlike that of the training, experts that are rare in
training may look overloaded although their bias is raised rightly.

What to do: look at the sign of the update (up where the load is below the mean) and at the order of
the counts; record tokens that are drawn as the training draws them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moegeom.checks.check import Tested
from moegeom.core.text import number_of
from moegeom.geometry.series import rank_agreement
from moegeom.studies.track.history import History
from moegeom.studies.track.series_check import SeriesCheck, same_onset, share

#: Intervals of the shortest stretch that is looked at.
_SHORTEST = 2


def _judge(history: History) -> Iterator[Tested]:
    for router in history.routers:
        if router.bias is None or router.loads is None:
            continue
        # Loads at the beginning of an interval: a bias that happens to be high at its end makes
        # the load there high, with any update.
        steps, loads = np.diff(router.bias, axis=0), router.loads[:-1]
        starts = range(len(steps) - _SHORTEST + 1)
        found = [rank_agreement(steps[start:], loads[start:]) for start in starts]
        onset = min(starts, key=lambda start: found[start].p_value)
        one = found[onset]
        first, last = (float(router.loads[at].std()) for at in (onset, -1))
        finding = CHECK.finding(
            router.name,
            f"from step {history.step(onset)} on its selection bias rises for experts above the "
            "mean load and falls for those below.",
            f"Correlation of ranks {one.correlation:+.2f} over {len(steps) - onset} intervals, by "
            f"chance within {one.by_chance:.2f} of 0 (95 %). Load CV {first:.2f} -> {last:.2f}. "
            "Look at the sign of the update, and whether counts and biases are in one order.",
        )
        is_told = one.correlation > 0.0 and last >= first
        p_value = min(1.0, one.p_value * len(starts))
        yield Tested(router.name, finding if is_told else None, p_value)


def _too_few_experts(history: History) -> str:
    looks = len(history.steps) - _SHORTEST
    most = max(len(router.bias[0]) for router in history.routers if router.bias is not None)
    if looks * math.exp(-math.lgamma(most + 1.0)) <= share(history):
        return ""
    return f"no more than {number_of(most, 'expert')}, too few for a correlation of ranks"


CHECK = SeriesCheck(
    "MGT203",
    "the selection bias runs the wrong way",
    "warning",
    _judge,
    inputs="series and tokens",
    absent="no router has a selection bias at every step",
    alike=same_onset,
    least_steps=lambda history: _SHORTEST + 1,
    needs_bias=True,
    too_little=_too_few_experts,
)
