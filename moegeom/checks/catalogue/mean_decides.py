"""MGG302: the mean input does not decide the choice.

Looked for: the pull of the mean input, the rms over experts of their mean score over the rms of
what tells tokens apart, with the selection bias where there is one; beside the pull that routers of
random directions have on the same inputs, mean and standard deviation.

A finding means: what all tokens have in common favours some experts more than tokens differ, and
more than in a router of random directions. Loads are uneven and few expert sets occur, because of
one vector, the mean input, whatever the rows are like otherwise.

What to do: look at `moegeom balance`, whose bias takes the pull away, and in training at what
balances loads. The limit is heuristic, from few models.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding

#: Standard deviations of routers of random directions that it has to lie above their mean.
_SIGMAS = 3.0


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    found = []
    for row in measured.layers:
        pull = row.get("input_pull_with_bias")
        pull = row.get("input_pull") if pull is None else pull
        mean, deviation = row.get("input_pull_random"), row.get("input_pull_random_sd")
        if pull is None or mean is None or deviation is None:
            continue
        if pull > max(limits("pull", row["router"]), mean + _SIGMAS * deviation):
            found.append((pull, mean, deviation, row["router"]))
    for pull, mean, deviation, router in sorted(found, reverse=True):
        yield CHECK.finding(
            router,
            f"the mean input favours some experts {pull:.2g} times as much as tokens differ.",
            f"Routers of random directions: {mean:.2g} +- {deviation:.1g}. Loads are uneven for "
            "that one vector's sake; moegeom balance says which bias takes it away.",
        )


CHECK = Check(
    "MGG302",
    "the mean input decides much of the choice",
    "warning",
    _judge,
    ("input_pull", "input_pull_random"),
    (Limit("pull", 0.5, "largest pull of the mean input, beside that of random directions"),),
    inputs="tokens",
    absent="the recording holds no router inputs",
)
