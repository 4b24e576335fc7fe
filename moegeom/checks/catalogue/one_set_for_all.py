"""MGI127: tokens differ in the experts that they choose.

Looked for: routers at which every token of the recording, two or more, chooses one and the same set
of experts although there are others.

A finding means: the tokens are equal, or so much alike that the recording shows one point of the
input space, or the router ignores its input. Shares, loads and errors are then those of a single
token, repeated: they say nothing about any other, however many tokens were recorded.

What to do: look at how the tokens were recorded (one prompt repeated, padding, a constant input),
and record text that differs. If it does differ, look at the rows and biases of the router.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits, Unknown
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.text import all_of


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    for row in measured.layers:
        router, tokens = row["router"], row["num_tokens"] or 0
        shape = measured.facts(router)
        experts, top_k = shape.get("num_experts"), shape.get("top_k")
        if row.get("num_expert_sets") != 1 or not top_k or top_k == experts:
            continue
        if tokens < 2:
            yield Unknown(router, "one token differs from no other; needed: more tokens")
            continue
        yield CHECK.finding(
            router,
            f"{all_of(tokens, 'token')} choose the same {top_k} of {experts} experts.",
            "Equal tokens, or a router that ignores its input: shares and loads of this recording "
            "say nothing about other tokens.",
            measured.measure_again(router, extra="--per-token"),
        )


CHECK = Check(
    "MGI127",
    "all tokens choose the same experts",
    "warning",
    _judge,
    ("num_expert_sets",),
    inputs="tokens",
    absent="the tokens say nothing of expert sets",
    severities={"release": "error"},
)
