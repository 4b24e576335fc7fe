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

from collections.abc import Iterator
from math import isinf

from moegeom.checks.check import Check, Limits
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.text import number_of

#: Scores that are never below 0.
_POSITIVE = ("sigmoid", "softmax", "sqrt_softplus")


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    found = []
    for mask in measured.run["group_masks"]:
        rows = measured.experts.get(mask["router"], ())
        biases = [bias for e in rows if (bias := e.get("selection_bias")) is not None]
        if mask["score"] not in _POSITIVE or not biases or len(biases) < len(rows):
            continue
        size = len(biases) // mask["num_groups"]
        safe = [
            sum(bias >= 0.0 for bias in biases[start : start + size])
            for start in range(0, len(biases), size)
        ]
        fewest = sum(sorted(safe)[: mask["num_kept"]])
        if fewest < mask["top_k"]:
            found.append((fewest, min(biases), mask))
    for fewest, least, mask in sorted(found, key=lambda entry: entry[:2]):
        kept, groups, k = mask["num_kept"], mask["num_groups"], mask["top_k"]
        is_own = not isinf(float(mask["fill"]))
        whose = "as this family's own rule does" if is_own else "as some engines do"
        yield CHECK.finding(
            mask["router"],
            f"{kept} of {groups} groups may hold {number_of(fewest, 'expert')} sure to beat 0.0, "
            f"fewer than the {k} to choose.",
            f"Biases go down to {least:.3g}. Where dropped groups are filled with 0.0, {whose}, a "
            f"dropped expert wins once the other scores are below {-least:.3g}.",
        )


CHECK = Check(
    "MGN120",
    "an expert of a dropped group can be chosen where it is filled with 0.0",
    "warning",
    _judge,
    facts="group_masks",
    absent="no rule drops groups",
    severities={"release": "error"},
)
