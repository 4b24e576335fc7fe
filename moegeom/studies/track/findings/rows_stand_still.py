"""MGT104: no router stands still while the others are trained.

Looked for: rows that change by no more than a hundredth of what the moving routers do (median,
heuristic), from some step on to the end. Only intervals count in which more than half of the
others change by 0.3 % of their length, more than writing them again in bfloat16 would: in a run
that is over nothing does.

A finding means: the router no longer gets updates: it fell out of the optimiser, its gradient is 0
or not finite, or its updates are too small for the precision it is kept in. Experts are trained on
behind a choice that no longer learns.

What to do: look whether the parameter is in the optimiser and its gradient arrives, and in which
precision it is updated. Where it was frozen on purpose, leave the layer out (--layers).
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.core.finding import Finding
from moegeom.core.text import number_of, percent
from moegeom.studies.track.findings._standing import standing
from moegeom.studies.track.history import History
from moegeom.studies.track.series_check import SeriesCheck, same_onset


def _judge(history: History) -> Iterator[Finding]:
    rates = {r.name: r.row_rates for r in history.routers if r.row_rates is not None}
    for one in standing(rates):
        others = number_of(one.num_moving, "other router moves", "other routers move")
        yield CHECK.finding(
            one.router,
            f"from step {history.step(one.onset)} on its rows stand still, and {others} on.",
            f"They change by {percent(one.own)} of their length from step to step (median), those "
            f"of the others by {percent(one.others)}. Look whether the optimiser holds the router.",
        )


CHECK = SeriesCheck(
    "MGT104",
    "a router stands still while others are trained",
    "warning",
    _judge,
    inputs="series",
    alike=same_onset,
    too_little=lambda history: "" if len(history.routers) > 1 else "there is no other router",
)
