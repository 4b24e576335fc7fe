"""Tokens: whether a recording is of this checkpoint, and how its tokens and inputs differ."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Limit, Limits, Unknown, check
from moegeom.checks.figure import Figure, change_check, figure_check
from moegeom.checks.measured import MeanPull, Measured
from moegeom.core.finding import Finding
from moegeom.core.text import all_of, number_of


def _too_little(measured: Measured) -> str:
    """Inputs of the right length are those of any checkpoint of the family."""
    trust = measured.run.get("trust") or {}
    names = trust.get("fingerprint", "unknown") != "unknown" or trust.get("overridden")
    if names or any(row.get("num_reproduced") is not None for row in measured.layers):
        return ""
    return "the tokens name no checkpoint and hold no choices to follow"


@check(
    "MGI108",
    "the recording is not valid for this checkpoint",
    "error",
    limits=(
        Limit("share", 0.05, "largest share of choices that differ by more than float rounding"),
    ),
    inputs="tokens",
    too_little=_too_little,
)
def recording_not_valid(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """The recording belongs to this checkpoint and holds what its routers read.

    Looked for: tests of the recording that failed and were allowed to (--stale-inputs,
    --unverified), and recorded choices that do not follow from the recorded inputs.

    A finding means: figures on tokens may be those of another checkpoint, another layer or another
    rule.

    What to do: record this checkpoint.
    """
    for message in (measured.run.get("trust") or {}).get("overridden", ()):
        yield recording_not_valid.finding(
            (), "a test of the recording failed and was allowed.", message
        )
    for row in measured.layers:
        counted = [row.get(name) for name in ("num_reproduced", "num_near_tie")]
        lost = row.get("num_not_reproduced")
        if not lost:
            continue
        share = lost / (sum(count or 0 for count in counted) + lost)
        if share > limits("share", row["router"]):
            yield recording_not_valid.finding(
                row["router"],
                f"{100 * share:.1f} % of the recorded choices do not follow from the recorded "
                "inputs.",
                f"{number_of(lost, 'choice differs', 'choices differ')} by more than rounding "
                "can. Another rule, a shifted "
                "recording, or an engine in lower precision.",
                measured.measure_again(row["router"], extra="--per-token"),
            )


@check(
    "MGI127",
    "all tokens choose the same experts",
    "warning",
    ("num_expert_sets",),
    inputs="tokens",
    absent="the tokens say nothing of expert sets",
    severities={"release": "error"},
)
def one_set_for_all(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """Tokens differ in the experts that they choose.

    Looked for: routers at which every token of the recording, two or more, chooses one and the same
    set of experts although there are others.

    A finding means: the tokens are equal, or so much alike that the recording shows one point of
    the input space, or the router ignores its input. Shares, loads and errors are then those of a
    single token, repeated: they say nothing about any other, however many tokens were recorded.

    What to do: look at how the tokens were recorded (one prompt repeated, padding, a constant
    input), and record text that differs. If it does differ, look at the rows and biases of the
    router.
    """
    for row in measured.layers:
        router, tokens = row["router"], row["num_tokens"] or 0
        shape = measured.facts(router)
        experts, top_k = shape.get("num_experts"), shape.get("top_k")
        if row.get("num_expert_sets") != 1 or not top_k or top_k == experts:
            continue
        if tokens < 2:
            yield Unknown(router, "one token differs from no other; needed: more tokens")
            continue
        yield one_set_for_all.finding(
            router,
            f"{all_of(tokens, 'token')} choose the same {top_k} of {experts} experts.",
            "Equal tokens, or a router that ignores its input: shares and loads of this recording "
            "say nothing about other tokens.",
            measured.measure_again(router, extra="--per-token"),
        )


@figure_check(
    "MGG301",
    "router inputs have collapsed to one direction",
    "mean_resultant_length",
    Limit("length", 0.95, "largest mean resultant length of the router inputs"),
    detects=lambda shift: f"a mean resultant length {shift:.3f} above its limit",
    room=lambda figure: 1.0 - figure.limit,
    absent="the recording holds no router inputs",
)
def angular_collapse(figure: Figure) -> tuple[str, str]:
    """Router inputs point different ways.

    Looked for: the mean resultant length of the router inputs, that is the length of the mean of
    their unit vectors: 0 when directions are spread, 1 when all are one.

    A finding means: tokens differ little in direction, so few expert sets can occur whatever the
    router does: the cause is in front of the router.

    What to do: look at the hidden states, and at attention sinks. The limit is heuristic.
    """
    return (
        f"router inputs nearly all point the same way: mean resultant length {figure.value:.3f}.",
        f"Limit {figure.limit:g}, {figure.basis(3)}.",
    )


#: Largest pull; heuristic.
MOST_PULL = 0.5


@check(
    "MGG302",
    "the mean input decides much of the choice",
    "warning",
    ("input_pull", "input_pull_random"),
    limits=(
        Limit(
            "pull", MOST_PULL, "largest pull of the mean input, beside that of random directions"
        ),
    ),
    inputs="tokens",
    absent="the recording holds no router inputs",
)
def mean_decides(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """The mean input does not decide the choice.

    Looked for: the pull of the mean input, the rms over experts of their mean score over the rms of
    what tells tokens apart, with the selection bias where there is one; beside the pull that
    routers of random directions have on the same inputs, mean and standard deviation.

    A finding means: what all tokens have in common favours some experts more than tokens differ,
    and more than in a router of random directions. Loads are uneven and few expert sets occur,
    because of one vector, the mean input, whatever the rows are like otherwise.

    What to do: `moegeom imbalance` says how much of the imbalance it makes, and what taking it away
    costs; look in training at what balances loads. The limit is heuristic, from few models.
    """
    pulls = []
    for row in measured.layers:
        pull = MeanPull.of(row)
        if pull is not None and pull.is_above(limits("pull", row["router"])):
            pulls.append((row["router"], pull))
    for router, pull in sorted(pulls, key=lambda pair: -pair[1].here):
        yield mean_decides.finding(
            router,
            f"the mean input favours some experts {pull.here:.2g} times as much as tokens differ.",
            f"Rows in random directions: {pull.random:.2g} +- {pull.deviation:.1g}. Loads are "
            "uneven for that one vector's sake; moegeom imbalance says how much of it that makes.",
            measured.measure_again(router, command="imbalance"),
        )


@change_check(
    "MGG402",
    "router inputs are not spread as they were",
    "mean_resultant_length",
    Limit("change", 0.02, "largest change of the mean resultant length"),
    detects=lambda shift: f"a mean resultant length that changed by {shift:.3f} more than allowed",
    largest=1.0,
    absent="the recording holds no router inputs",
)
def directions_changed(old: float, new: float) -> str:
    """Router inputs are as spread in direction as they were.

    Looked for: the mean resultant length of the router inputs beside that of the baseline; a change
    counts when it is beyond the limit by more than chance.

    A finding means: what the router reads has changed: another norm in front, other hidden states,
    or other tokens.

    What to do: compare equal mixtures of text first, then the gain of the norm (MGI122).
    """
    return f"mean resultant length {new:.3f}; the baseline has {old:.3f}."
