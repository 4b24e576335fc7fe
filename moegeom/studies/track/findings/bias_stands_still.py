"""MGT105: no selection bias stands still while those of other routers are updated.

Looked for: biases, a common offset taken out, that change by no more than a hundredth of what those
of the moving routers do (median, heuristic), for two intervals at least up to the end. Only
intervals count in which more than half of the others change by 0.3 % of their largest spread.
Biases that all stop at once were stopped on purpose, as late in training they are.

A finding means: the update no longer reaches this router: it was left out, or is lost in a bias
that is kept in too few bits.

What to do: look whether the buffer is among those that are updated, and keep it in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.core.finding import Finding
from moegeom.core.text import number_of, percent
from moegeom.studies.track.findings._standing import standing
from moegeom.studies.track.history import History
from moegeom.studies.track.series_check import SeriesCheck, same_onset


def _judge(history: History) -> Iterator[Finding]:
    rates = {r.name: r.bias_rates for r in history.routers if r.bias_rates is not None}
    # two intervals: biases that swing in units of their update may meet themselves once
    for one in standing(rates, 2):
        others = number_of(one.num_moving, "other router moves", "other routers move")
        yield CHECK.finding(
            one.router,
            f"from step {history.step(one.onset)} on its selection bias stands still, and that of "
            f"{others} on.",
            f"It changes by {percent(one.own)} of its largest spread from step to step (median), "
            f"that of the others by {percent(one.others)}. Look whether its update is applied, and "
            "in how many bits it is kept.",
        )


def _too_few(history: History) -> str:
    number = sum(router.bias is not None for router in history.routers)
    return "" if number > 1 else "no other router has a selection bias"


CHECK = SeriesCheck(
    "MGT105",
    "a selection bias stands still while others are updated",
    "warning",
    _judge,
    inputs="series",
    absent="no router has a selection bias at every step",
    alike=same_onset,
    least_steps=lambda history: 3,
    needs_bias=True,
    too_little=_too_few,
)
