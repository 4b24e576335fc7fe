"""MGG302: the mean input does not decide the choice.

Looked for: the pull of the mean input, the rms over experts of their mean score over the rms of
what tells tokens apart, with the selection bias where there is one; beside the pull that routers of
random directions have on the same inputs, mean and standard deviation.

A finding means: what all tokens have in common favours some experts more than tokens differ, and
more than in a router of random directions. Loads are uneven and few expert sets occur, because of
one vector, the mean input, whatever the rows are like otherwise.

What to do: `moegeom space` says how much of the imbalance it makes, `moegeom balance` which bias
takes it away; look in training at what balances loads. The limit is heuristic, from few models.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits
from moegeom.checks.measured import MeanPull, Measured
from moegeom.core.finding import Finding

#: Largest pull; heuristic.
MOST_PULL = 0.5


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    found = []
    for row in measured.layers:
        pull = MeanPull.of(row)
        if pull is not None and pull.is_above(limits("pull", row["router"])):
            found.append((row["router"], pull))
    for router, pull in sorted(found, key=lambda pair: -pair[1].here):
        yield CHECK.finding(
            router,
            f"the mean input favours some experts {pull.here:.2g} times as much as tokens differ.",
            f"Rows in random directions: {pull.random:.2g} +- {pull.deviation:.1g}. Loads are "
            "uneven for that one vector's sake; moegeom space says how much of it that makes.",
            measured.measure_again(router, command="space"),
        )


CHECK = Check(
    "MGG302",
    "the mean input decides much of the choice",
    "warning",
    _judge,
    ("input_pull", "input_pull_random"),
    (Limit("pull", MOST_PULL, "largest pull of the mean input, beside that of random directions"),),
    inputs="tokens",
    absent="the recording holds no router inputs",
)
