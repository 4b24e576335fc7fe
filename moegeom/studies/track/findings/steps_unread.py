"""MGT106: every step that is there can be read.

Looked for: matches of the pattern that are no whole checkpoint (empty, without weights or config,
shards that an index names and that are not there) or whose files cannot be opened. A step whose
name, or one of whose files, says that it is being written (.partial, .tmp, .temp, .incomplete) is
listed, and not counted.

A finding means: the series is inconclusive. Nothing is known of that step, so the series has a
hole, at its end more often than not.

What to do: look at the file that is named. A job that follows a training should write a step under
a name that ends in .tmp, and rename it.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Unknown
from moegeom.studies.track.history import History
from moegeom.studies.track.series_check import SeriesCheck


def _judge(history: History) -> Iterator[Unknown]:
    for name, reason in history.unread:
        yield Unknown(name, reason)


CHECK = SeriesCheck(
    "MGT106",
    "a step cannot be read",
    "error",
    _judge,
    inputs="series",
    of_each_step=True,
)
