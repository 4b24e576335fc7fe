"""MGT107: no step fails a check of integrity.

Looked for: what MGI101 and the other checks of integrity find in each step by itself, at the
severity error: numbers that are not finite, tensors of wrong shapes, rules that no engine takes.

A finding means: the routers of that step cannot route as they stand. A series of figures would show
it as a gap.

What to do: moegeom check on the step tells the whole of it; do not go on training from it.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.core.finding import Finding
from moegeom.core.text import number_of
from moegeom.studies.track.history import History
from moegeom.studies.track.series_check import SeriesCheck


def _judge(history: History) -> Iterator[Finding]:
    for name, path, findings in history.broken:
        first, *others = findings
        more = f" And {number_of(len(others), 'more finding')}." if others else ""
        yield CHECK.finding(
            first.routers,
            f"{name} is broken: {first.code}, {first.title}",
            f"{first.detail}{more}",
            f"moegeom check {path}",
        )


CHECK = SeriesCheck(
    "MGT107",
    "a step fails a check of integrity",
    "error",
    _judge,
    inputs="series",
    of_each_step=True,
)
