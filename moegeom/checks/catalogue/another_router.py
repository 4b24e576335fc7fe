"""MGI124: the routers are of the same kind as the baseline's.

Looked for: family, rule, numbers of experts, chosen experts and hidden size, and the list of
routers.

A finding means: the baseline belongs to another model, or a conversion changed the rule. Other
comparisons with it mean nothing.

What to do: compare with the right baseline, or write a new one (--update-baseline) once the change
is understood.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits, same_sentence
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding

_WORDS = {"num_experts": "experts", "hidden_size": "inputs", "top_k": "chosen experts"}


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    baseline = measured.baseline
    if baseline is None:
        return
    for key in ("family", "rule"):
        now, old = measured.run["checkpoint"][key], baseline.checkpoint.get(key)
        if now != old:
            yield CHECK.finding(
                (), f"the {key} is {now!r}; the baseline has {old!r}.", "", "moegeom families"
            )
    known = {facts["name"] for facts in measured.run["routers"]}
    missing = sorted(set(baseline.routers) - known)
    if missing and not measured.run.get("layers_requested"):
        yield CHECK.finding(
            tuple(missing),
            f"{len(missing)} router{'s' * (len(missing) > 1)} of the baseline not there: "
            f"{', '.join(missing[:4])}.",
            "",
            f"moegeom routers {measured.checkpoint}",
        )
    if new := sorted(known - set(baseline.routers)):
        yield CHECK.finding(
            tuple(new),
            f"{len(new)} router{'s' * (len(new) > 1)} not in the baseline.",
            "What is new is compared with nothing.",
            f"moegeom routers {measured.checkpoint}",
        )
    for row in measured.layers:
        router, before = row["router"], measured.before(row["router"])
        facts = measured.facts(router)
        if before is None:
            continue
        differing = [
            f"{facts[name]} {words} (baseline {before.facts[name]})"
            for name, words in _WORDS.items()
            if facts[name] != before.facts[name]
        ]
        if differing:
            yield CHECK.finding(router, f"the router has {', '.join(differing)}.")


CHECK = Check(
    "MGI124",
    "the routers are not those of the baseline",
    "error",
    _judge,
    inputs="baseline",
    alike=same_sentence,
)
