"""MGI113: the config says how experts are scored.

Looked for: the key that names the gating function (``scoring_func``, ``expert_gating_func``), and
other keys without which an engine that is known chooses by another rule.

A finding means: engines guess, and not all the same: softmax for sigmoid, or the selection bias
left out. The text stays plausible, half of the tokens go to other experts, and whatever is measured
on the way (importance matrices, quantised weights) is measured of another model. Where the rule
cannot be known at all this is an error, where a default is assumed a warning: an engine with the
same default is right. A config that names its keys gives no finding, so it gives no false alarm.

What to do: write the keys into the config or the header, as the source of the checkpoint has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from moegeom.checks.check import OLDER, Check, Limits
from moegeom.checks.measured import Measured, knows_config
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    yield from CHECK.refused(measured)
    for unsaid in measured.run.get("gating", {}).get("unsaid", ()):
        found = CHECK.finding(
            (),
            f"the config does not say '{unsaid['key']}': {unsaid['others']}.",
            f"Assumed is {unsaid['assumed']}.",
        )
        yield dataclasses.replace(found, severity="warning")


CHECK = Check(
    "MGI113",
    "the config does not say how experts are scored",
    "error",
    _judge,
    alike=lambda finding: finding.title,
    too_little=lambda measured: "" if knows_config(measured.run) else OLDER,
    severities={"release": "error"},
)
