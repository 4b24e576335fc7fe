"""MGN120: no expert of a dropped group can be chosen, whatever is written over its score.

Looked for: in rules that keep g of G groups, selection biases so low that fewer than k experts of
some g groups need have a biased score above 0. Scores are above 0, so that an expert with a bias of
at least 0 always beats a dropped one at 0.0; if g groups hold fewer than k such experts, a token
whose scores are small chooses from a group that was dropped.

A finding means: with dropped groups at 0.0 (older engines, some kernels) experts of dropped groups
are chosen, with them at -inf they are not: two engines differ in this alone. Where the rule of the
family itself fills with 0.0 it happens in its own engine. It follows from the signs of the biases;
whether tokens get there depends on their scores (``fill_decides_share`` of a scan counts them), so
that this is a warning.

What to do: fill with -inf in every engine, or add a constant to all biases of the layer that makes
them positive: with -inf it changes no choice, and with 0.0 it takes the fault away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isinf
from typing import Any

from moegeom.checks.check import OLDER, Check, Limits, Unknown
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.text import number_of

#: Scores that are never below 0.
_POSITIVE = ("sigmoid", "softmax", "sqrt_softplus")


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    found = []
    for facts in _masked(measured):
        rows = measured.experts.get(facts["name"], ())
        biases = [bias for e in rows if (bias := e.get("selection_bias")) is not None]
        if facts["score"] not in _POSITIVE or not facts["has_selection_bias"]:
            continue
        if len(biases) < len(rows):
            yield Unknown(facts["name"], "not all of its selection biases are known")
            continue
        size = len(biases) // facts["num_groups"]
        safe = [
            sum(bias >= 0.0 for bias in biases[start : start + size])
            for start in range(0, len(biases), size)
        ]
        fewest = sum(sorted(safe)[: facts["num_kept_groups"]])
        if fewest < facts["top_k"]:
            found.append((fewest, min(biases), facts))
    for fewest, least, facts in sorted(found, key=lambda entry: entry[:2]):
        kept, groups, k = facts["num_kept_groups"], facts["num_groups"], facts["top_k"]
        is_own = not isinf(float(facts["group_fill"]))
        whose = "as this family's own rule does" if is_own else "as some engines do"
        yield CHECK.finding(
            facts["name"],
            f"{kept} of {groups} groups may hold {number_of(fewest, 'expert')} sure to beat 0.0, "
            f"fewer than the {k} to choose.",
            f"Biases go down to {least:.3g}. Where dropped groups are filled with 0.0, {whose}, a "
            f"dropped expert wins once the other scores are below {-least:.3g}.",
        )


def _masked(measured: Measured) -> list[Mapping[str, Any]]:
    """Facts of the routers whose rule drops groups."""
    routers = measured.run.get("routers", ())
    return [facts for facts in routers if facts.get("group_fill") is not None]


def _too_little(measured: Measured) -> str:
    masked = _masked(measured)
    if any("num_kept_groups" not in facts for facts in masked):
        return OLDER
    return "" if masked else "no rule drops groups"


CHECK = Check(
    "MGN120",
    "an expert of a dropped group can be chosen where it is filled with 0.0",
    "warning",
    _judge,
    too_little=_too_little,
    severities={"release": "error"},
)
