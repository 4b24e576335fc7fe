"""MGN119: the quantization_config leaves routers out.

Looked for: routers that are stored plain, in a checkpoint whose ``quantization_config`` covers all
linear modules and whose list of exceptions names none of them.

A finding means: an engine whose router is such a linear module makes a quantised one of it: it asks
for scales that are not there, or rounds the router while it loads. Engines that never quantise
routers of this family are not concerned, so that this is a warning; the rule that decides is the
engine's. A list that names the modules, by name, glob or regular expression, gives no finding.

What to do: add the routers to the list that the finding names (such as ``re:.*mlp.gate$``), or
accept the code in a profile with the engine that is used as the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    asked = measured.run["quantisation"]
    plain = [one for one in asked["plain"] if one["router"] in measured.experts]
    covered = [one for one in plain if one["is_covered"]]
    if covered:
        yield CHECK.finding(
            tuple(one["router"] for one in covered),
            f"{len(covered)} of {len(plain)} routers are stored plain, and "
            f"'{asked['key']}' does not leave them out.",
            f"The quantisation ({asked['method']}) covers linear modules, "
            f"'{covered[0]['module']}' among them, unless they are listed.",
        )


CHECK = Check(
    "MGN119",
    "the quantization_config covers routers that are stored plain",
    "warning",
    _judge,
    facts="quantisation",
    absent="the config asks for no quantisation",
    severities={"release": "error"},
)
