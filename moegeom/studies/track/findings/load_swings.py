"""MGT201: loads do not swing from one step to the next.

Looked for: loads that lie now on one side of their mean and now on the other, along the direction
in which they scatter most, more often than in a series of any order (runs test; every stretch of 8
steps or more up to the last is looked at and counted), whose swings do not die down (those of the
last half are 0.7 of those of the first at least) and move an expert by 0.1 fair shares a step at
least (both heuristic). The tokens must be the same at every step.

A finding means: something overcorrects: a bias or a balancing loss drives tokens to and fro between
the same experts. Scatter without memory and slow drifts do not look so.

What to do: make the update of the bias, or the weight of the balancing loss, smaller; look whether
the bias swings as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Tested
from moegeom.studies.track.findings._swings import least_swing, swing
from moegeom.studies.track.history import History
from moegeom.studies.track.series_check import SeriesCheck, least_steps_for, same_onset

#: Fair shares by which the load of an expert must change from step to step to matter.
_LEAST = 0.1


def _judge(history: History) -> Iterator[Tested]:
    for router in history.routers:
        if router.loads is None:
            continue
        found = swing(router.loads)
        finding = CHECK.finding(
            router.name,
            f"from step {history.step(found.onset)} on its loads swing: {found.num_crossings} of "
            f"{found.num_places} steps cross their mean.",
            f"Expert {found.expert} swings most, by {found.size:.2f} fair shares a step. Make the "
            "update of the bias, or the weight of the balancing loss, smaller.",
        )
        is_told = found.is_lasting and found.size >= _LEAST
        yield Tested(router.name, finding if is_told else None, found.p_value)


CHECK = SeriesCheck(
    "MGT201",
    "loads swing from step to step",
    "warning",
    _judge,
    inputs="series and tokens",
    alike=same_onset,
    least_steps=least_steps_for(least_swing),
    needs_one_text=True,
)
