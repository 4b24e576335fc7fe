"""MGI115: every router of the checkpoint was looked at.

Looked for: routers that are found by name and not measured: skipped because their choice does not
follow from router and input, under a prefix that is not known, or in layers that were not asked
for. Judged under the profile ``release`` only; elsewhere the verdict line counts them.

A finding means: none is made. Where a router was left out the check is inconclusive (exit code 4),
since nothing is known of it. It gives no false alarm: it counts names.

What to do: ``moegeom routers CKPT`` names what is skipped, with the reason. Layers that look
their experts up by token id are judged by MGI111 and can be accepted here with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits, Unknown
from moegeom.checks.measured import Measured
from moegeom.checks.unseen import unseen_routers


def _judge(measured: Measured, limits: Limits) -> Iterator[Unknown]:
    for left_out in unseen_routers(measured):
        yield Unknown("checkpoint", f"{left_out} were not looked at")


CHECK = Check(
    "MGI115",
    "routers were not looked at",
    "error",
    _judge,
    only_in=("release",),
)
