"""MGI124: the routers are of the same kind as the baseline's.

Looked for: the rule of each router step by step, with what its weights are divided and multiplied
by; numbers of experts, chosen experts and hidden size; and the list of routers. A baseline of an
older version knows the family and the text of its rule only. Another format of file may have
another name for the same family.

A finding means: the baseline belongs to another model, or a conversion changed the rule. Other
comparisons with it mean nothing.

What to do: compare with the right baseline, or write a new one (--update-baseline) once the change
is understood.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.baseline import Baseline
from moegeom.checks.check import Check, Limits, same_sentence
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding

_WORDS = {"num_experts": "experts", "hidden_size": "inputs", "top_k": "chosen experts"}


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    baseline = measured.baseline
    if baseline is None:
        return
    yield from _other_rule(measured, baseline)
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


def _other_rule(measured: Measured, baseline: Baseline) -> Iterator[Finding]:
    """The rules of the routers step by step; where the baseline lacks them, families and texts."""
    known = {n: r.facts["rule"] for n, r in baseline.routers.items() if "rule" in r.facts}
    for row in measured.layers:
        now, old = measured.facts(row["router"]).get("rule"), known.get(row["router"])
        if old is not None and now is not None and now != old:
            title = f"the rule is {now!r}; the baseline has {old!r}."
            yield CHECK.finding(row["router"], title, "", "moegeom families")
    for key in () if known else ("family", "rule"):
        now, old = measured.run["checkpoint"][key], baseline.checkpoint.get(key)
        if now != old:
            yield CHECK.finding(
                (), f"the {key} is {now!r}; the baseline has {old!r}.", "", "moegeom families"
            )


CHECK = Check(
    "MGI124",
    "the routers are not those of the baseline",
    "error",
    _judge,
    inputs="baseline",
    alike=same_sentence,
)
