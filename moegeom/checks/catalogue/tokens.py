"""Tokens: whether a recording is of this checkpoint, and how its tokens and inputs differ."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moegeom.checks.check import NO_ERROR, Limit, Limits, Tested, Unknown, check
from moegeom.checks.figure import Figure, change_check, figure_check
from moegeom.checks.measured import NO_NAME, MeanPull, Measured, Row
from moegeom.checks.statistics import p_above
from moegeom.core.finding import Finding
from moegeom.core.text import all_of, number_of, percent


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


def _no_trace(measured: Measured) -> str:
    notes = (measured.run.get("tokens") or {}).get("notes") or ("",)
    return "" if notes[0].startswith("Trace of") else "the tokens are no trace of an engine"


@check(
    "MGI129",
    "the trace lacks tokens, or holds ids that are no choices",
    "warning",
    inputs="tokens",
    too_little=_no_trace,
    severities={"release": "error"},
    alike=lambda finding: finding.title,
)
def trace_is_odd(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Every token of the trace is there, with what its routers chose.

    Looked for: tokens of requests without a row of choices, and how these lie (exactly the prompts,
    the first or last rows, one run, rows in turn, whole requests; which requests), prompts of equal
    rows, ids of one rank's experts alone, and the first experts in order where a mask or token ids
    say that a token stands.

    A finding means: loads and sets are those of the tokens that are left, which are of one kind, or
    in part of no token at all.

    What to do: what the finding says of its kind; `moegeom routes FILE` says the same without a
    checkpoint. Where it is meant (prompts are not wanted), the file should say where rows begin.
    """
    routers = tuple(row["router"] for row in measured.layers)
    again = "" if measured.tokens == NO_NAME else f"moegeom routes {measured.tokens}"
    for oddity in (measured.run.get("tokens") or {}).get("oddities", ()):
        detail = f"{oddity['text']} {oddity['hint']}"
        yield trace_is_odd.finding(routers, f"{oddity['word']}.", detail, again)


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
    the input space, or the router ignores its input. Shares, loads and errors are those of a single
    token, repeated: they say nothing about any other.

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
    "MGN122",
    "routing weights do not add up to 1",
    "guarded_weight_share",
    Limit("share", 0.1, "largest share of the routing weight that the guard may take"),
    detects=lambda shift: f"a share {shift:.3f} above its limit",
    room=lambda figure: 1.0 - figure.limit,
    absent="the rule's sum of weights cannot be as small as its guard, or there are no logits",
    severity="error",
    severities={"training": "warning"},
)
def weight_guarded(figure: Figure) -> tuple[str, str]:
    """Routing weights that are divided by their sum add up to 1.

    Looked for: the share of the routing weight that is lost because scores are as small as what is
    added to their sum, or bounds it, against a division by 0. Weights alone bound no such share:
    without a bias on logits, half of all inputs give an expert a logit above 0.

    A finding means: routed experts count for less than the rule says, in the extreme for nothing:
    the layer is its shared experts and its residual. Logits drifted to large negative numbers, or
    the epsilon of the config is that of another dtype.

    What to do: look at the mean of the logits (an offset that all rows share), and compare the
    epsilon with the code that trained the model. The limit is heuristic.
    """
    return (
        f"the guard of their sum takes {percent(figure.value)} of the routing weight.",
        f"They add up to {1.0 - figure.value:.3g}. Limit {figure.limit:g}, {figure.basis(3)}.",
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
    and more than in a router of random directions. Because of that one vector loads are uneven and
    few expert sets occur, whatever the rows are like otherwise.

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
            f"the mean input biases expert logits by {pull.here:.2g}x their spread over tokens.",
            f"Rows in random directions: {pull.random:.2g}x +- {pull.deviation:.1g}. That one "
            "vector makes the load uneven; moegeom imbalance says how much.",
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


COLUMN = "bf16_flip_share_isotropic"


@check(
    "MGN301",
    "more near-ties than chance",
    "warning",
    (COLUMN,),
    limits=(Limit("times_random", 1.5, "largest exposure, in exposures of the random router"),),
    inputs="tokens",
    absent="boundary distances are not known for this rule or recording",
    detects=lambda shift: f"{100 * shift:.2f} % of tokens more at near-ties than the limit",
)
def near_ties(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
    """Near-ties are no more frequent than at a random router of the same shape.

    Looked for: an expected share of tokens flipped by rounding the router input to bfloat16 that is
    above a multiple of that of the random router (random rows of the same length on the same
    tokens) by more than chance.

    A finding means: other arithmetic, engines or quantisations will flip more tokens than the shape
    of the router makes inevitable. That is exposure, not loss of quality.

    What to do: list the nearest tokens and pairs of experts. The factor is heuristic.
    """

    def ratio(row: Row) -> float:
        normal = measured.random.get(row["router"], {}).get(COLUMN)
        return (row.get(COLUMN) or 0.0) / normal if normal else 0.0

    for row in sorted(measured.layers, key=ratio, reverse=True):
        router, random = row["router"], measured.random.get(row["router"], {})
        share, normal = row.get(COLUMN), random.get(COLUMN)
        # Equal rows tie for ever: that is MGI104's to say.
        if share is None or row.get("num_duplicate_rows"):
            continue
        if normal is None:
            yield Unknown(router, f"{COLUMN} of a random router cannot be computed")
            continue
        own, chance = row.get(f"{COLUMN}_se"), random.get(f"{COLUMN}_se")
        if own is None or chance is None:
            yield Unknown(router, NO_ERROR)
            continue
        factor, freedom = limits("times_random", router), row["num_blocks"] - 1
        error = math.hypot(own, factor * chance)
        finding = near_ties.finding(
            router,
            "more near-ties than a random router of this shape would have.",
            f"Rounding the input to bf16 would flip about {100 * share:.1f} % of tokens; a "
            f"random router {100 * normal:.1f} % (limit {factor:g} times, heuristic).",
            measured.measure_again(router, extra="--per-token"),
        )
        yield Tested(
            router,
            finding,
            p_above(share, factor * normal, error, freedom),
            error,
            freedom,
            # a share of tokens on average at most half certain to flip
            room=0.5 - factor * normal,
            p_beyond=p_above(-share, -factor * normal, error, freedom),
        )


@check(
    "MGN302",
    "logits are too large for bfloat16",
    "warning",
    ("log_sum_exp_mean", "z_loss", "margin_p50"),
    limits=(Limit("steps", 2.0, "largest step of bfloat16 at the logits, in median margins"),),
    inputs="tokens",
    absent="there are no logits",
    too_little=lambda measured: (
        ""
        if any(_compares_logits(measured, row) for row in measured.layers)
        else "no rule compares logits"
    ),
)
def large_logits(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Logits are small enough to be told apart in bfloat16.

    Looked for: the step of bfloat16 at the size of the logits (the mean of their log-sum-exp less
    one standard deviation, which the median exceeds, less that of as many zeros) beside the median
    margin between the last chosen expert and the first one left out, of rules that compare logits.

    A finding means: an engine that keeps logits in bfloat16 rounds most choices away: they are ties
    there, or fall otherwise. Logits drift by a number that all experts share, which softmax does
    not see and no loss but z-loss holds.

    What to do: keep logits in float32, or subtract the mean row from every row: softmax choices and
    weights stay. `moegeom boundary-report --arith bf16-logits` counts the flips. The limit is
    heuristic.
    """
    for row in measured.layers:
        router = row["router"]
        mean, square, margin = map(row.get, ("log_sum_exp_mean", "z_loss", "margin_p50"))
        if mean is None or square is None or margin is None:
            continue
        if not _compares_logits(measured, row):
            continue
        # a few tokens with logits of hundreds raise the mean, and the deviation more
        spread = math.sqrt(max(square - mean**2, 0.0))
        level = abs(mean - math.log(measured.facts(router)["num_experts"])) - spread
        step = math.ulp(max(level, 0.0)) * 2.0**45  # 8 bits of significand, not 53
        if step > limits("steps", router) * margin:
            yield large_logits.finding(
                router,
                f"at the size of its logits bfloat16 steps by {step:.2g}.",
                f"Those of most tokens are beyond {level:.3g} in size; the median margin is "
                f"{margin:.2g}. In bfloat16 most choices are ties "
                f"(limit {limits('steps', router):g} margins, heuristic).",
                measured.measure_again(router, "--arith bf16-logits", "boundary-report"),
            )


def _compares_logits(measured: Measured, row: Row) -> bool:
    return measured.facts(row["router"]).get("is_affine", False)


@change_check(
    "MGN401",
    "near-boundary exposure is not what it was",
    "bf16_flip_share_isotropic",
    Limit("change", 0.001, "largest change of the share of tokens"),
    detects=lambda shift: f"an exposure that changed by {100 * shift:.2f} % of tokens",
    largest=0.5,
    absent="boundary distances are not known for this rule or recording",
)
def near_boundary_changed(old: float, new: float) -> str:
    """As many tokens are near another expert set as were.

    Looked for: the expected share of tokens flipped by rounding the router input to bfloat16,
    beside that of the baseline; a change counts when it is beyond the limit by more than chance.

    A finding means: margins, lengths of rows or the inputs changed, so that other arithmetic will
    flip more, or fewer, tokens than before. Exposure, not loss of quality.

    What to do: compare the rows (MGG401) and the directions of the inputs (MGG402).
    """
    return (
        f"rounding the input to bf16 would flip {100 * new:.2f} % of tokens; the baseline has "
        f"{100 * old:.2f} %."
    )
