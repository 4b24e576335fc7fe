"""MGT102: no selection bias that had been moved is back at one number for all experts.

Looked for: a step at which every expert of a router has the same selection bias, where at the step
before it they had three different ones at least: two are what a single update leaves, and what the
next may take back.

A finding means: the bias was not in the state that the job resumed from, and began again as it was
made, mostly at 0. The load that it had balanced is uneven from there on.

What to do: look whether the bias, mostly a buffer and no parameter, is saved and loaded; train
again from the step before, or let the bias settle before loads count.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.core.finding import Finding
from moegeom.studies.track.history import History
from moegeom.studies.track.series_check import SeriesCheck, same_onset

#: Different biases of a router that has been updated more than once.
_LEAST_DIFFERENT = 3


def _judge(history: History) -> Iterator[Finding]:
    for router in history.routers:
        if router.bias is None:
            continue
        spread = np.ptp(router.bias, axis=1)
        kinds = np.array([len(np.unique(values)) for values in router.bias])
        resets = np.flatnonzero((kinds[1:] == 1) & (kinds[:-1] >= _LEAST_DIFFERENT)) + 1
        if not len(resets):
            continue
        now = int(resets[0])
        yield CHECK.finding(
            router.name,
            f"at step {history.step(now)} every selection bias is {router.bias[now, 0]:.3g} again.",
            f"At step {history.step(now - 1)} they spread over {spread[now - 1]:.3g}. Look whether "
            "the bias is in the state that is saved and loaded.",
        )


CHECK = SeriesCheck(
    "MGT102",
    "the selection bias was reset",
    "error",
    _judge,
    inputs="series",
    absent="no router has a selection bias at every step",
    alike=same_onset,
    needs_bias=True,
)
