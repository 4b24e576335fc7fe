"""MGN117: routers are stored as precisely as their family stores them.

Looked for: fewer mantissa bits in the stored weight or selection bias than the family's own
checkpoints have.

A finding means: a conversion or a quantiser rounded the router. It is the smallest part of the
model and the one whose rounding changes which experts run.

What to do: take the routers from the original; put them on the list of modules to skip.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits, without_saying
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding

_PARTS = (("weight", "weight", "stored_dtype"), ("bias", "selection bias", "bias_dtype"))


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in measured.layers:
        for column, what, dtype in _PARTS:
            bits, kept = row.get(f"{column}_bits"), row.get(f"{column}_bits_kept")
            if bits is not None and kept is not None and bits < kept:
                yield CHECK.finding(
                    row["router"],
                    f"the {what} is stored with {bits} mantissa bits; its family keeps {kept}.",
                    f"Stored as {measured.facts(row['router']).get(dtype, '?').lower()}. What was "
                    "rounded away cannot be had back from this file.",
                )


CHECK = Check(
    "MGN117",
    "a router is stored more coarsely than its family keeps it",
    "warning",
    _judge,
    ("weight_bits_kept",),
    concerns=without_saying,
    absent="nothing is known of how the family stores its routers",
    severities={"release": "error"},
)
