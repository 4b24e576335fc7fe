"""MGI102: the gain of the norm in front of every router is finite.

Looked for: entries of the gain with nan or infinity.

A finding means: the router input has that coordinate nan or infinite for every token, and with it
every logit. The file is damaged, or training diverged before it was saved.

What to do: compare the file with its source, then look at earlier checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits, without_saying
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.text import number_of


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in measured.layers:
        count = row.get("num_non_finite_gain")
        if count:
            entries = number_of(count, "entry of the gain is", "entries of the gain are")
            yield CHECK.finding(
                row["router"],
                f"{entries} not finite: neither is any logit of any token.",
                "The norm in front multiplies the router input by its gain, coordinate by "
                "coordinate.",
            )


CHECK = Check(
    "MGI102",
    "the gain in front of a router is not finite",
    "error",
    _judge,
    ("num_non_finite_gain",),
    absent="no norm stands in front of a router",
    concerns=without_saying,
)
