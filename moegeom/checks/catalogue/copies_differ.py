"""MGI114: a router that is stored several times is the same everywhere.

Looked for: files or folders of several ranks that hold tensors of one name (``model-rank-0``,
``mp_rank_01``, ``tp1``), and a router under several names. Routers, biases and gains are compared
byte by byte.

A finding means: the replicas of a router drifted apart in training, as they do when its gradient is
not summed over the ranks, or the files are of two checkpoints. Which one an engine loads is chance,
and each rank trained another model. Copies that are equal give no finding, and a tensor that is cut
over the ranks is no copy where its shape says so: equal copies are never an alarm.

What to do: find the step from which they differ. Where routers were meant to be cut over the ranks,
join the slices with the tool that wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    yield from CHECK.refused(measured)


CHECK = Check("MGI114", "copies of a router differ", "error", _judge)
