"""MGI108: the recording belongs to this checkpoint and holds what its routers read.

Looked for: tests of the recording that failed and were allowed to (--stale-inputs, --unverified),
and recorded choices that do not follow from the recorded inputs.

A finding means: figures on tokens may be those of another checkpoint, another layer or another
rule.

What to do: record this checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.text import number_of


def _too_little(measured: Measured) -> str:
    """Inputs of the right length are those of any checkpoint of the family."""
    trust = measured.run.get("trust") or {}
    names = trust.get("fingerprint", "unknown") != "unknown" or trust.get("overridden")
    if names or any(row.get("num_reproduced") is not None for row in measured.layers):
        return ""
    return "the tokens name no checkpoint and hold no choices to follow"


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for message in (measured.run.get("trust") or {}).get("overridden", ()):
        yield CHECK.finding((), "a test of the recording failed and was allowed.", message)
    for row in measured.layers:
        counted = [row.get(name) for name in ("num_reproduced", "num_near_tie")]
        lost = row.get("num_not_reproduced")
        if not lost:
            continue
        share = lost / (sum(count or 0 for count in counted) + lost)
        if share > limits("share", row["router"]):
            yield CHECK.finding(
                row["router"],
                f"{100 * share:.1f} % of the recorded choices do not follow from the recorded "
                "inputs.",
                f"{number_of(lost, 'choice differs', 'choices differ')} by more than rounding "
                "can. Another rule, a shifted "
                "recording, or an engine in lower precision.",
                measured.measure_again(row["router"], extra="--per-token"),
            )


CHECK = Check(
    "MGI108",
    "the recording is not valid for this checkpoint",
    "error",
    _judge,
    limits=(
        Limit("share", 0.05, "largest share of choices that differ by more than float rounding"),
    ),
    inputs="tokens",
    too_little=_too_little,
)
