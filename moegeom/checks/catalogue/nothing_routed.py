"""MGI109: fewer experts are chosen than there are.

Looked for: routers whose rule chooses as many experts as they have rows.

A finding means: every token goes to every expert. Nothing is routed, and no figure about choices
says anything; only the routing weights still depend on the router.

What to do: look at the number of chosen experts in the config, or at --top-k. A pruned model may
have kept the number that it had before.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.text import all_of


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    whole: dict[int, list[str]] = {}
    for row in measured.layers:
        facts = measured.facts(row["router"])
        if facts and facts["top_k"] == facts["num_experts"]:
            whole.setdefault(facts["num_experts"], []).append(row["router"])
    for experts, routers in whole.items():
        yield CHECK.finding(
            tuple(routers),
            f"{all_of(experts, 'expert is', 'experts are')} chosen for every token.",
            "Nothing is routed: loads are even whatever the weights are.",
        )


CHECK = Check("MGI109", "every expert is chosen", "error", _judge)
