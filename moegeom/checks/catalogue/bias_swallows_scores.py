"""MGN114: the selection bias leaves room for the score.

Looked for: a step of bfloat16, at the largest bias, that is no longer small beside the range of the
score, which is 1 for sigmoid and softmax; and a step of float32 that is no longer small beside the
small scores, of which a sigmoid or a softmax over many experts has most.

A finding means: where an engine adds score and bias in bfloat16, most of the score is rounded away,
and tokens are routed by the bias alone. In float32 scores below half a step vanish: experts that
only they tell apart tie, and a kernel that takes the score back as sum minus bias weighs them 0. A
bias below 8 gives neither, so that biases that only balance loads raise no false alarm.

What to do: add in float32; or subtract a constant from all biases of the layer, which changes no
choice unless masked groups are filled with 0.0. Keep the scores for the weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits, has_selection_bias
from moegeom.checks.fixes import recentre
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding

#: Scores that never leave the interval from 0 to 1.
_BOUNDED = ("sigmoid", "softmax")

#: A step of float32 over one of bfloat16 at the same number.
_FLOAT32 = 2.0**-16


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in sorted(measured.layers, key=lambda row: -(row.get("bias_ulp_bf16") or 0.0)):
        router, step = row["router"], row.get("bias_ulp_bf16")
        if step is None or measured.facts(router).get("score") not in _BOUNDED:
            continue
        fine = _FLOAT32 * step
        if step >= limits("step", router):
            yield CHECK.finding(
                router,
                f"at the size of the selection bias bfloat16 steps by {step:.2g}; scores end at 1.",
                f"Biases lie around {row['bias_middle']:.3g}. A sum of score and bias in bfloat16 "
                f"would keep {max(1.0 / step, 1.0):.0f} different scores; in float32 scores below "
                f"{fine / 2.0:.2g} vanish.",
                fix=recentre(measured, row).strip(),
            )
        elif fine >= limits("step_float32", router):
            yield CHECK.finding(
                router,
                f"at the size of the selection bias float32 steps by {fine:.2g}: scores below half "
                "of that vanish.",
                f"Biases lie around {row['bias_middle']:.3g}. A kernel that takes the score back "
                "as sum minus bias weighs such experts 0.",
                fix=recentre(measured, row).strip(),
            )


CHECK = Check(
    "MGN114",
    "the selection bias swallows the score",
    "warning",
    _judge,
    ("bias_ulp_bf16",),
    (
        Limit("step", 0.0625, "least step of bfloat16 at the largest bias; the score's range is 1"),
        Limit("step_float32", 9e-7, "the same of float32, beside which small scores vanish"),
    ),
    absent="no router has a selection bias",
    concerns=has_selection_bias,
    severities={"release": "error"},
)
