"""The selection bias: its precision, its offset, and whether training moved it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial

import numpy as np

from moegeom.checks.catalogue.changes import drifts, without_drift
from moegeom.checks.catalogue.precision import lost_levels
from moegeom.checks.check import Limit, Limits, Unknown, check, has_selection_bias
from moegeom.checks.measured import Measured, Row, spread_of
from moegeom.core.finding import Finding
from moegeom.core.text import number_of, percent

#: Where all biases are one number, a cast made them so only if its step swallows their spread: at
#: this step, around 4, it does in known models.
SWALLOWS = 2.0**-5

_bias_check = partial(check, absent="no router has a selection bias", concerns=has_selection_bias)


@_bias_check(
    "MGN111",
    "the selection bias has collapsed in the file",
    "error",
    ("bias_num_distinct",),
    limits=(
        Limit("step_over_spread", 0.05, "largest step of bfloat16 over the spread of the biases"),
    ),
)
def bias_collapsed(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """The stored selection bias tells experts apart.

    Looked for: biases that are bfloat16 numbers throughout, at most half as many different values
    as experts, and a step of bfloat16 that is no longer small beside their spread.

    A finding means: the bias was cast to bfloat16 on its way into this file, and the differences
    that balance the experts are gone. Training kept them in float32.

    What to do: take the bias from a checkpoint that keeps it in float32. The lost digits cannot be
    had back from this file.
    """
    worst = sorted(measured.layers, key=lambda row: row.get("bias_num_distinct") or 0)
    for row in worst:
        distinct, spread = row.get("bias_num_distinct"), row.get("bias_spread")
        if distinct is None or not row["is_bias_bf16"]:
            continue
        router = row["router"]
        experts = len(measured.experts[router])
        if distinct == 1:
            # all alike: a cast made them so only where its steps swallow updates of training
            step = math.inf if row["bias_ulp_bf16"] >= SWALLOWS else 0.0
        else:
            step = row["bias_ulp_bf16"] / spread
        if 2 * distinct <= experts and step > limits("step_over_spread", router):
            yield bias_collapsed.finding(
                router,
                f"the selection bias has {distinct} different value{'s' * (distinct > 1)} for "
                f"{experts} experts.",
                f"All are bfloat16 numbers. They spread {spread:.2g} around "
                f"{row['bias_middle']:.3g}, where bfloat16 steps by {row['bias_ulp_bf16']:.2g}: "
                "the cast that made them took away what told experts apart.",
            )


@_bias_check(
    "MGN112",
    "the selection bias does not survive a cast to bfloat16",
    "warning",
    ("bias_spread",),
    limits=(
        Limit("step_over_spread", 0.05, "largest step of bfloat16 over the spread of the biases"),
    ),
    severities={"release": "error"},
)
def bias_cast(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """The selection bias survives a cast to bfloat16.

    Looked for: a step of bfloat16, at the largest bias, that is not small beside the spread of the
    biases, and the number of different values that a cast would leave.

    A finding means: an engine that casts the bias (some do as soon as a quantisation config is
    present) routes most tokens elsewhere.

    What to do: keep the tensor in float32 in every engine; or subtract a constant from all biases
    of a layer before the cast, where the finding proves that neutral.
    """

    def step(row: Row) -> float:
        spread = row.get("bias_spread")
        return row["bias_ulp_bf16"] / spread if spread and not row["is_bias_bf16"] else 0.0

    for row in sorted(measured.layers, key=step, reverse=True):
        router = row["router"]
        if step(row) <= limits("step_over_spread", router):
            continue
        shut = row.get("num_unreachable_bf16") or 0
        sure = row.get("num_certain_bf16") or 0
        lost = f" {number_of(shut, 'expert')} could no longer be chosen at all." if shut else ""
        lost += f" {number_of(sure, 'expert')} could no longer lose." if sure else ""
        yield bias_cast.finding(
            router,
            "the selection bias does not survive a cast to bfloat16.",
            f"{row['bias_num_distinct']} distinct values become {row['bias_num_distinct_bf16']}: "
            f"they spread {row['bias_spread']:.2g} around {row['bias_middle']:.3g}, where bfloat16 "
            f"steps by {row['bias_ulp_bf16']:.2g}. {_moved(measured, row)}{lost} It is "
            f"stored in {measured.facts(router).get('bias_dtype', 'F32').lower()}.",
            fix=either(recentre(measured, row), keep_in_float32(measured, row)),
        )


def _moved(measured: Measured, row: Row) -> str:
    """Who would gain and who would lose most by the cast."""
    moves = {
        e["expert"]: e["bias_cast_shift"]
        for e in measured.experts[row["router"]]
        if e.get("bias_cast_shift") is not None
    }
    if not moves:
        return ""
    up, down = max(moves, key=moves.__getitem__), min(moves, key=moves.__getitem__)
    return (
        f"The cast would favour expert {up} by {moves[up]:.2g} and hold back expert {down} by "
        f"{-moves[down]:.2g}."
    )


@_bias_check(
    "MGN113",
    "updates of the selection bias are lost",
    "warning",
    ("bias_lost_update_share",),
    limits=(
        Limit("share", 0.1, "largest share of experts whose bias an update of 0.001 does not move"),
    ),
)
def bias_update_lost(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """An update of the selection bias is not lost in bfloat16.

    Looked for: biases stored as bfloat16 that a step of 0.001 up or down leaves where they are.

    A finding means: loss-free balancing adds such a step after each batch. Kept in bfloat16, every
    bias of 0.5 or more stays as it is for ever, and the load is no longer balanced.

    What to do: keep the bias in float32 in training and in checkpoints that training goes on from.
    """
    for row in sorted(measured.layers, key=lambda r: -(r.get("bias_lost_update_share") or 0.0)):
        share = row.get("bias_lost_update_share")
        if share is None or row["bias_bits"] is None or row["bias_bits"] > 7:
            continue
        router = row["router"]
        if share > limits("share", router):
            yield bias_update_lost.finding(
                router,
                f"an update of 0.001 would not move {100 * share:.0f} % of the selection biases.",
                f"They are stored as {measured.facts(router).get('bias_dtype', 'bf16').lower()}, "
                f"which steps by {row['bias_ulp_bf16']:.2g} at the largest of them.",
                fix=keep_in_float32(measured, row),
            )


#: Scores that never leave the interval from 0 to 1.
_BOUNDED = ("sigmoid", "softmax")

#: A step of float32 over one of bfloat16 at the same number.
_FLOAT32 = 2.0**-16


@_bias_check(
    "MGN114",
    "the selection bias swallows the score",
    "warning",
    ("bias_ulp_bf16",),
    limits=(
        Limit("step", 0.0625, "least step of bfloat16 at the largest bias; the score's range is 1"),
        Limit("step_float32", 9e-7, "the same of float32, beside which small scores vanish"),
    ),
    severities={"release": "error"},
)
def bias_swallows_scores(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """The selection bias leaves room for the score.

    Looked for: a step of bfloat16, at the largest bias, that is no longer small beside the range of
    the score, which is 1 for sigmoid and softmax; and a step of float32 that is no longer small
    beside the small scores, of which a sigmoid or a softmax over many experts has most.

    A finding means: where an engine adds score and bias in bfloat16, most of the score is rounded
    away, and tokens are routed by the bias alone. In float32 scores below half a step vanish:
    experts that only they tell apart tie, and a kernel that takes the score back as sum minus bias
    weighs them 0. A bias below 8 gives neither.

    What to do: add in float32; or subtract a constant from all biases of the layer, which changes
    no choice unless masked groups are filled with 0.0. Keep the scores for the weights.
    """
    for row in sorted(measured.layers, key=lambda row: -(row.get("bias_ulp_bf16") or 0.0)):
        router, step = row["router"], row.get("bias_ulp_bf16")
        if step is None or measured.facts(router).get("score") not in _BOUNDED:
            continue
        fine = _FLOAT32 * step
        if step >= limits("step", router):
            yield bias_swallows_scores.finding(
                router,
                f"at the size of the selection bias bfloat16 steps by {step:.2g}; scores end at 1.",
                f"Biases lie around {row['bias_middle']:.3g}. A sum of score and bias in bfloat16 "
                f"would keep {max(1.0 / step, 1.0):.0f} different scores; in float32 scores below "
                f"{fine / 2.0:.2g} vanish.",
                fix=recentre(measured, row).strip(),
            )
        elif fine >= limits("step_float32", router):
            yield bias_swallows_scores.finding(
                router,
                f"at the size of the selection bias float32 steps by {fine:.2g}: scores below half "
                "of that vanish.",
                f"Biases lie around {row['bias_middle']:.3g}. A kernel that takes the score back "
                "as sum minus bias weighs such experts 0.",
                fix=recentre(measured, row).strip(),
            )


@_bias_check(
    "MGN115",
    "the selection biases have a common offset",
    "note",
    ("bias_spread",),
    limits=(Limit("offset_over_spread", 10.0, "largest |middle| over the spread of the biases"),),
)
def bias_offset(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """The selection biases of a layer have no common offset.

    Looked for: a middle of the biases that is many times their spread away from 0.

    A finding means: nothing is wrong with the choices, which a common offset does not touch. But it
    grows from update to update, and the larger it is, the fewer digits are left for what differs.

    What to do: recentre the biases now and then in training.
    """

    def ratio(row: Row) -> float:
        return abs(row["bias_middle"]) / row["bias_spread"] if row.get("bias_spread") else 0.0

    for row in sorted(measured.layers, key=ratio, reverse=True):
        if ratio(row) > limits("offset_over_spread", row["router"]):
            yield bias_offset.finding(
                row["router"],
                f"the selection biases lie {ratio(row):.0f} times their spread away from 0.",
                f"They spread {row['bias_spread']:.2g} around {row['bias_middle']:.3g}.",
                fix=recentre(measured, row).strip(),
            )


@_bias_check(
    "MGN116",
    "the selection bias was never updated",
    "warning",
    ("bias_num_distinct",),
    severities={"release": "error", "training": "note"},
)
def bias_never_updated(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """The selection bias was trained.

    Looked for: biases that are the same for every expert of a layer, mostly all 0.

    A finding means: the update after each batch never reached them, or they were lost in a
    conversion and written as zeros. The rule adds them in vain, and nothing balances the load.

    What to do: compare with the source; in training, look whether the update runs and whether the
    buffer is saved.
    """
    for row in measured.layers:
        if row.get("bias_num_distinct") != 1 or len(measured.experts[row["router"]]) < 2:
            continue
        if not row["is_bias_bf16"] or row["bias_ulp_bf16"] < SWALLOWS:  # else MGN111 names the cast
            yield bias_never_updated.finding(
                row["router"],
                f"every expert has the selection bias {row['bias_mean']:.3g}: none was ever moved.",
                "Either training never updated it, or a conversion wrote a constant.",
            )


@_bias_check(
    "MGN123",
    "the selection bias is frozen",
    "warning",
    ("selection_bias_digest",),
    limits=(
        Limit(
            "moved",
            0.003,  # rounding to bfloat16 alone moves rows by 0.0018
            "mean movement of the rows from which on a bias should move too",
        ),
    ),
    inputs="baseline",
    severities={"release": "error"},
)
def bias_frozen(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """The selection bias moves when the rows do.

    Looked for: a bias that is bit for bit the baseline's beside rows that changed as training
    changes them: without a pattern, and without losing digits.

    A finding means: training went on and the bias was not updated with it, or not saved. Late in
    training a bias may be frozen on purpose: then ignore this check with that reason.

    What to do: look whether the buffer is in the optimiser step and in the saved state.
    """
    name = "selection_bias_digest"
    yield from without_drift(measured)
    for row, drift in drifts(measured):
        router, before = row["router"], measured.before(row["router"])
        if before is None or row.get(name) is None:
            continue
        moved = float(drift.moved.mean())
        is_trained = drift.is_trained() and not lost_levels(before, row)
        if before.digests.get(name) == row[name] and is_trained and moved > limits("moved", router):
            yield bias_frozen.finding(
                router,
                "the rows moved since the baseline, and not one selection bias did.",
                f"Rows moved by {percent(moved)} of their length on average.",
            )


_BIASES = {"selection_bias": "selection bias", "logit_bias": "logit bias"}


@check(
    "MGN126",
    "biases moved since the baseline",
    "warning",
    limits=(Limit("moved", 0.1, "largest movement of a bias, over the spread of the biases"),),
    inputs="baseline",
    severities={"release": "error", "training": "note"},
)
def bias_moved(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """The biases of every router are where they were.

    Looked for: the selection bias and the logit bias of each expert beside the baseline, less what
    is common to all experts, over their spread in the baseline.

    A finding means: these biases route other tokens than they did: permuted, negated, zeroed, cast,
    or trained. Between two steps of a training that is expected; after a conversion it is not.

    What to do: one layer alone points at a file, all layers at training. The limit is heuristic; a
    profile for conversions may well put it at 0.001.
    """
    findings: list[tuple[float, Finding]] = []
    for row in measured.layers:
        router, before = row["router"], measured.before(row["router"])
        for name, words in _BIASES.items():
            old = getattr(before, name, None)
            now = [e.get(name) for e in measured.experts[router]]
            if old is None or len(now) != len(old):
                continue  # another shape, or a bias that came or went: MGI124 and MGI107 say so
            if None in now:
                yield Unknown(router, f"its {words} is not finite, or was not measured")
                continue
            drift = measured.drifts.get(router)
            if drift is not None and (drift.renumbered.any() or drift.faults(words)):
                continue  # MGI121 asks whether the biases moved along; MGI128 names the fault
            change = np.array(now, dtype=np.float64) - old
            change -= np.median(change)  # a common offset changes no choice
            largest, spread = float(np.abs(change).max()), spread_of(old)
            share = largest / spread if spread else math.inf if largest else 0.0
            if share > limits("moved", router):
                limit = percent(limits("moved", router))
                findings.append((share, _finding(measured, router, words, change, spread, limit)))
    yield from (finding for _, finding in sorted(findings, key=lambda pair: -pair[0]))


def _finding(
    measured: Measured, router: str, words: str, change: np.ndarray, spread: float, limit: str
) -> Finding:
    expert = int(np.abs(change).argmax())
    by = (
        f"by {percent(abs(change[expert]) / spread)} of its spread" if spread else "from the others"
    )
    return bias_moved.finding(
        router,
        f"the {words} of expert {expert} moved {by} since the baseline.",
        f"{np.count_nonzero(change)} of {len(change)} biases changed, a common offset taken out; "
        f"they spread {spread:.3g} (limit {limit}, heuristic).",
    )


def recentre(measured: Measured, row: Row) -> str:
    """Subtracting one number from all biases of a layer; empty where it would not help.

    Every comparison of the rule is between sums of equally many selection scores, expert against
    expert or group against group, so a common shift cancels. A group mask that fills with 0.0
    compares shifted scores with an unshifted 0: there it is not neutral, and that is said.
    """
    after, now = row["bias_num_distinct_bf16_recentred"], row["bias_num_distinct_bf16"]
    if after <= now:
        return ""
    fill = measured.facts(row["router"]).get("group_fill")
    if fill is not None and fill != "-inf":
        return (
            f"not by recentring: masked groups are filled with {fill}, which a shifted score would "
            "be compared with. "
        )
    groups = ", masked groups are -inf" if fill is not None else ""
    return (
        f"subtract {row['bias_middle']:.6g} from every bias of the layer: "
        f"{number_of(after, 'value survives', 'values survive')}. "
        "Proof that no choice changes: scores are compared with scores, sums of two with sums of "
        f"two{groups}; a common shift cancels. "
    )


def keep_in_float32(measured: Measured, row: Row) -> str:
    """The list of tensors that engines must not cast, as one pattern."""
    tensor = measured.facts(row["router"]).get("bias_tensor")
    if not tensor:
        return ""
    return f"keep in float32: {re.sub(r'[0-9]+', '*', tensor, count=1)}"


def either(first: str, second: str) -> str:
    """Both fixes, the second as another way; one alone as it is."""
    return " Another way: ".join(text.strip() for text in (first, second) if text)
