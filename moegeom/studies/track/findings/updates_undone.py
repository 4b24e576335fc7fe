"""MGT103: no step takes back what the steps before it did to a router.

Looked for: the share of the way from an earlier step to the last that the next step takes back, all
rows brought to one length. Steps that go on independently of each other take back nothing, rows
that only scatter about a point one half. A finding takes back three quarters at least (heuristic),
more than one half by Student's t over the experts, and ends nearer to the earlier step than to the
last, by 0.6 of the squared distance (heuristic); not at two steps in a row, as swings would.

A finding means: the job went on from the earlier step and trained from there. That is meant where a
run was rolled back after a spike of the loss; else updates are lost. It is also what one checkpoint
of another kind looks like, such as averaged weights among those of single steps.

What to do: compare the step that the log resumed from with the one named here; where the run was
rolled back on purpose, leave the steps that it gave up out of the series.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moegeom.checks.check import Tested
from moegeom.checks.statistics import p_above
from moegeom.core.text import percent
from moegeom.geometry.series import Undone, undone
from moegeom.studies.track.history import History, RouterHistory
from moegeom.studies.track.series_check import SeriesCheck, same_onset

#: Share of the way that is taken back, and of the squared distance that is left, from and up to
#: which it is a return: one interval that is lost of a walk gives 1 and 0.5, scatter 0.5 and 1.
_LEAST_UNDONE = 0.75
_MOST_NEARNESS = 0.6

#: What independent scatter about a point takes back.
_OF_SCATTER = 0.5


@dataclass(frozen=True)
class _Return:
    """One step, and how much of the way from the nearest earlier one it takes back."""

    now: int
    earlier: int
    found: Undone
    p_value: float

    @property
    def is_one(self) -> bool:
        """Whether it is large enough to be told."""
        return self.found.share >= _LEAST_UNDONE and self.found.nearness <= _MOST_NEARNESS


def _judge(history: History) -> Iterator[Tested]:
    for router in history.routers:
        found = _returns(router)
        if not found:
            continue
        large = [one.is_one for one in found]
        single = [
            one
            for place, one in enumerate(found)
            if large[place] and not any(large[max(place - 1, 0) : place] + large[place + 1 :][:1])
        ]
        if not single:
            yield Tested(router.name, None, 1.0)
            continue
        one = min(single, key=lambda one: (one.p_value, one.now))
        p_value = min(1.0, one.p_value * len(found))
        yield Tested(router.name, _finding(history, router.name, one), p_value)


def _finding(history: History, router: str, one: _Return):
    earlier, before = history.step(one.earlier), history.step(one.now - 1)
    nearness = percent(float(np.sqrt(one.found.nearness)))
    return CHECK.finding(
        router,
        f"step {history.step(one.now)} takes back {percent(one.found.share)} of the way from step "
        f"{earlier} to step {before}.",
        f"By scatter alone it would be half. Its distance to step {earlier} is {nearness} of that "
        f"to step {before}: look at what the job resumed from.",
    )


def _returns(router: RouterHistory) -> list[_Return]:
    """For each step from the third on, beside the earlier step that it is nearest to."""
    if router.grams is None or len(router.grams) < 2:
        return []
    total = router.grams.sum(axis=0)
    squares = np.diag(total)
    distance = squares[:, None] + squares[None, :] - 2.0 * total
    found = []
    for now in range(2, len(total)):
        earlier = int(distance[now, : now - 1].argmin())
        one = undone(router.grams, earlier, now - 1, now)
        if _is_same(router, now, earlier):
            one = Undone(np.nan, np.nan, np.nan)  # bit for bit: another check tells it
        p_value = p_above(one.share, _OF_SCATTER, one.error, len(router.grams) - 1.0)
        found.append(_Return(now, earlier, one, min(1.0, p_value * (now - 1))))
    return found


def _is_same(router: RouterHistory, now: int, earlier: int) -> bool:
    return router.row_digests[now] == router.row_digests[earlier] != ""


CHECK = SeriesCheck(
    "MGT103",
    "updates of a router are undone",
    "warning",
    _judge,
    inputs="series",
    alike=same_onset,
    least_steps=lambda history: 3,
)
