"""MGT202: selection biases do not swing from one step to the next.

Looked for: biases, a common offset taken out, that lie now on one side of their mean and now on the
other, along the direction in which they scatter most, more often than in a series of any order
(runs test; every stretch of 8 steps or more up to the last is looked at and counted), whose swings
do not die down (those of the last half are 0.7 of those of the first at least) and move an expert
by a tenth of the spread of all biases a step at least (both heuristic).

A finding means: the bias is updated too strongly for how often it is updated: each update goes
beyond the balance, and the next one back. Updates that shrink, and the last unit of a constant one,
do not look so.

What to do: make the update smaller, or let it shrink towards the end; count loads over a larger
batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.checks.check import Tested
from moegeom.core.text import percent
from moegeom.studies.track.findings._swings import least_swing, swing
from moegeom.studies.track.history import History
from moegeom.studies.track.series_check import SeriesCheck, least_steps_for, same_onset

#: Share of the spread by which the bias of an expert must change from step to step to matter.
_LEAST = 0.1


def _judge(history: History) -> Iterator[Tested]:
    for router in history.routers:
        if router.bias is None:
            continue
        centred = router.bias - router.bias.mean(axis=1, keepdims=True)
        found = swing(centred)
        spread = float(np.sqrt((centred[found.onset :] ** 2).mean()))
        part = found.size / spread if spread > 0.0 else 0.0
        finding = CHECK.finding(
            router.name,
            f"from step {history.step(found.onset)} on its selection bias swings: "
            f"{found.num_crossings} of {found.num_places} steps cross the mean.",
            f"That of expert {found.expert} swings most, by {found.size:.2g} a step, "
            f"{percent(part)} of the spread. Make the update of the bias smaller.",
        )
        is_told = found.is_lasting and part >= _LEAST
        yield Tested(router.name, finding if is_told else None, found.p_value)


CHECK = SeriesCheck(
    "MGT202",
    "selection biases swing from step to step",
    "warning",
    _judge,
    inputs="series",
    absent="no router has a selection bias at every step",
    alike=same_onset,
    least_steps=least_steps_for(least_swing),
    needs_bias=True,
)
