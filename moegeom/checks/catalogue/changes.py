"""Changes of a router since the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from moegeom.checks.baseline import Baseline
from moegeom.checks.check import Limit, Limits, Unknown, check, same_sentence
from moegeom.checks.measured import Drift, Measured, Row, spread_of
from moegeom.core.finding import Finding
from moegeom.core.shapes import Int64
from moegeom.core.text import listed, number_of, percent


def drifts(measured: Measured) -> Iterator[tuple[Row, Drift]]:
    """Every router that the baseline has in the same shape, beside it."""
    for row in measured.layers:
        drift = measured.drifts.get(row["router"])
        if drift is not None and measured.before(row["router"]) is not None:
            yield row, drift


def without_drift(measured: Measured) -> Iterator[Unknown]:
    """Routers of the baseline whose rows cannot be compared; MGI124 tells those of other shapes."""
    for row in measured.layers:
        router, before = row["router"], measured.before(row["router"])
        if before is None or router in measured.drifts:
            continue
        if len(measured.experts[router]) == len(before.norms):
            yield Unknown(router, "its rows cannot be compared: infinite, or not measured")


_WORDS = {"num_experts": "experts", "hidden_size": "inputs", "top_k": "chosen experts"}


@check(
    "MGI124",
    "the routers are not those of the baseline",
    "error",
    inputs="baseline",
    alike=same_sentence,
)
def another_router(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """The routers are of the same kind as the baseline's.

    Looked for: the rule of each router step by step, with what its weights are divided and
    multiplied by; numbers of experts, chosen experts and hidden size; and the list of routers. A
    baseline of an older version knows family and text of the rule only; another format of file may
    name the same family otherwise.

    A finding means: the baseline belongs to another model, or a conversion changed the rule. Other
    comparisons with it mean nothing.

    What to do: compare with the right baseline, or write a new one (--update-baseline) once the
    change is understood.
    """
    baseline = measured.baseline
    if baseline is None:
        return
    yield from _other_rule(measured, baseline)
    names = {facts["name"] for facts in measured.run["routers"]}
    missing = sorted(set(baseline.routers) - names)
    if missing and not measured.run.get("layers_requested"):
        yield another_router.finding(
            tuple(missing),
            f"{len(missing)} router{'s' * (len(missing) > 1)} of the baseline not there: "
            f"{', '.join(missing[:4])}.",
            "",
            f"moegeom list routers {measured.checkpoint}",
        )
    if new := sorted(names - set(baseline.routers)):
        yield another_router.finding(
            tuple(new),
            f"{len(new)} router{'s' * (len(new) > 1)} not in the baseline.",
            "What is new is compared with nothing.",
            f"moegeom list routers {measured.checkpoint}",
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
            yield another_router.finding(router, f"the router has {', '.join(differing)}.")


def _other_rule(measured: Measured, baseline: Baseline) -> Iterator[Finding]:
    """The rules of the routers step by step; where the baseline lacks them, families and texts."""
    rules = {n: r.facts["rule"] for n, r in baseline.routers.items() if "rule" in r.facts}
    for row in measured.layers:
        now, old = measured.facts(row["router"]).get("rule"), rules.get(row["router"])
        if old is not None and now is not None and now != old:
            title = f"the rule is {now!r}; the baseline has {old!r}."
            yield another_router.finding(row["router"], title, "", "moegeom list families")
    for key in () if rules else ("family", "rule"):
        now, old = measured.run["checkpoint"][key], baseline.checkpoint.get(key)
        if now != old:
            yield another_router.finding(
                (), f"the {key} is {now!r}; the baseline has {old!r}.", "", "moegeom list families"
            )


@check(
    "MGI122",
    "the gain changed and the router did not follow",
    "error",
    ("weight_digest",),
    limits=(Limit("moved", 0.005, "largest movement of an effective row, over its length"),),
    inputs="baseline",
    severities={"training": "note"},
)
def gain_not_followed(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """Where the gain of the norm changed, the router followed.

    Looked for: a gain that differs from the baseline's in front of a router that is bit for bit the
    same, so that the effective router W diag(g) is another one.

    A finding means: the router file is identical and routes differently. Smoothing (AWQ,
    SmoothQuant) divided the gain by a scale that the router lacks, the gain was left out or applied
    in another way, or training went on with a frozen router.

    What to do: multiply the columns of the router by the scale, or leave the norm in front of
    routers out of the smoothing.
    """
    yield from without_drift(measured)
    for row, drift in drifts(measured):
        router = row["router"]
        if not is_gain_alone(measured, router, row):
            continue
        worst = float(drift.moved.max())
        if worst > limits("moved", router):
            yield gain_not_followed.finding(
                router,
                "the gain in front changed and the router did not follow.",
                f"The weight is bit for bit that of the baseline; the effective rows W diag(g) "
                f"moved by up to {percent(worst)} of their length.",
            )


def is_gain_alone(measured: Measured, router: str, row: Row) -> bool:
    """True when the gain differs from the baseline's and the weight does not."""
    before = measured.before(router)
    if before is None:
        return False

    def is_same(name: str) -> bool:
        return before.digests.get(name) == row.get(name)

    return is_same("weight_digest") and not is_same("gain_digest")


@check(
    "MGG401",
    "rows moved since the baseline",
    "warning",
    ("weight_digest",),
    limits=(Limit("moved", 0.05, "largest movement of a centred effective row, over its length"),),
    inputs="baseline",
    severities={"release": "error", "training": "note"},
)
def rows_moved(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """No row moved beyond the limit since the baseline.

    Looked for: the distance of each centred effective row to its place in the baseline, over its
    length, from 32 seeded projections: right for a row that was scaled, turned round or zeroed,
    else to 12 % (one standard error). A vector that was added to all rows is taken out where the
    rule does not depend on it; rows that changed places with their experts are compared in the new
    place. What has a name of its own is MGI128's.

    A finding means: these rows route other tokens than they did. Between two steps of a training
    that is expected; after a conversion or a quantisation it is not.

    What to do: one layer alone points at a file, all layers at training. The limit is heuristic; a
    profile for conversions may well put it at 0.01.
    """
    findings = []
    yield from without_drift(measured)
    for row, drift in drifts(measured):
        router = row["router"]
        if is_gain_alone(measured, router, row) or drift.faults("rows"):
            continue  # MGI122 and MGI128 name the cause
        moved, limit = drift.moved[~drift.renumbered], limits("moved", router)
        if not moved.size or not moved.max() > limit:
            continue
        count = int((moved > limit).sum())
        expert = int(np.argmax(np.where(drift.renumbered, -1.0, drift.moved)))
        findings.append(
            (
                float(moved.max()),
                rows_moved.finding(
                    router,
                    f"expert {expert} moved by about {percent(moved.max())} of its length since "
                    f"the baseline; {count} of {len(drift.moved)} rows moved.",
                    f"All rows together by {percent(drift.size)}, the median row by "
                    f"{percent(float(np.median(moved)))}; limit {percent(limit)}, heuristic.",
                ),
            )
        )
    yield from (finding for _, finding in sorted(findings, key=lambda pair: -pair[0]))


#: Pairs that a fix lists.
_MOST_PAIRS = 4

_ROWS = "rows are those of other experts"

#: A bias moved along when it is this near to its old value, over the spread of the biases.
_BIAS_MOVED = 0.1


@check(
    "MGI121",
    "rows changed places and their experts did not, or the reverse",
    "error",
    ("row_rank",),
    inputs="baseline",
)
def rows_renumbered(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """No row changed places since the baseline without its expert, and no expert without it.

    Looked for: rows that are far from their own place in the baseline and near another one, where a
    sample of every expert's weights and the selection bias tell whether the experts moved along;
    and experts whose sample is that of another expert in the baseline, while rows stayed. Experts
    with other weights than any in the baseline, as after training, have no place.

    A finding means: the rows of the router were permuted and the experts were not, or the reverse.
    Every token that chose an expert is now sent to another one.

    What to do: look at the conversion that wrote the file; experts sorted as text (expert 10 before
    expert 2) are the usual cause.
    """
    yield from without_drift(measured)
    for row, drift in drifts(measured):
        router = row["router"]
        if not drift.renumbered.any():
            yield from _experts_alone(measured, router)
            continue
        experts = np.flatnonzero(drift.renumbered).tolist()
        moved_along, why = _experts_moved_along(measured, router, drift)
        if moved_along:
            continue
        yield rows_renumbered.finding(
            router,
            f"{number_of(len(experts), 'row is that of another expert', _ROWS)} in the baseline: "
            f"{_swaps(drift.place, experts)}.",
            f"{why} Rows of other experts: {listed(experts)}.",
            fix=_exchange(drift.place, _tensors(measured, router, drift.place)),
        )


def _swaps(place: Int64[np.ndarray, "experts"], experts: Sequence[int]) -> str:
    swaps = ", ".join(f"{expert} was {place[expert]}" for expert in experts[:4])
    return swaps + " ..." * (len(experts) > 4)


def _experts_alone(measured: Measured, router: str) -> Iterator[Finding]:
    """Experts that are found in another place of the baseline, while no row is."""
    before = measured.before(router)
    now = [e.get("expert_sample") for e in measured.experts[router]]
    if before is None or before.samples is None or len(before.samples) != len(now):
        return
    numbers = {sample: expert for expert, sample in enumerate(before.samples)}
    place = np.array([numbers.get(str(sample), own) for own, sample in enumerate(now)])
    experts = np.flatnonzero(place != np.arange(len(now))).tolist()
    if not experts or len(numbers) < len(now):
        return  # experts that are alike in the baseline cannot be told apart
    yield rows_renumbered.finding(
        router,
        f"{number_of(len(experts), 'expert is', 'experts are')} those of other rows in the "
        f"baseline: {_swaps(place, experts)}.",
        f"The rows are where they were: they did not move along. Experts that changed places: "
        f"{listed(experts)}.",
        fix=_exchange(place, ("experts",)),
    )


def _exchange(place: Int64[np.ndarray, "experts"], tensors: Sequence[str]) -> str:
    """``exchange rows 3 and 9 of x``, where all that moved are such pairs; else empty."""
    moved = np.flatnonzero(place != np.arange(len(place))).tolist()
    pairs = [(a, int(place[a])) for a in moved if a < place[a] and place[place[a]] == a]
    if not tensors or 2 * len(pairs) != len(moved) or len(pairs) > _MOST_PAIRS:
        return ""
    what = "" if tensors == ("experts",) else "rows "
    words = ", ".join(f"{what}{a} and {b}" for a, b in pairs)
    if not what:
        return f"exchange experts {words}, which puts each back to its row."
    return f"exchange {words} of {' and of '.join(tensors)}, which puts each back to its expert."


def _tensors(
    measured: Measured, router: str, place: Int64[np.ndarray, "experts"]
) -> tuple[str, ...]:
    """What to exchange rows of: the weight, and a selection bias that moved along with them."""
    facts, before = measured.facts(router), measured.before(router)
    first = tuple(facts.get("tensors", ())[:1])
    if before is None or before.selection_bias is None or not facts.get("bias_tensor"):
        return first
    bias = np.array([e["selection_bias"] for e in measured.experts[router]], dtype=np.float64)
    moved = np.abs(bias - before.selection_bias[place]).sum()
    has_moved = moved < np.abs(bias - before.selection_bias).sum()
    return (*first, facts["bias_tensor"]) if has_moved else first


def _experts_moved_along(measured: Measured, router: str, drift: Drift) -> tuple[bool, str]:
    """Whether everything that belongs to the rows moved with them, and the evidence."""
    before = measured.before(router)
    rows = measured.experts[router]
    groups = int(measured.facts(router).get("num_groups") or 1)
    of_group = drift.place.reshape(groups, -1) // (len(drift.place) // groups)
    if (of_group != of_group[:, :1]).any():
        return False, (
            f"The rule keeps whole groups of experts ({groups}), and the new places mix groups: "
            "other experts compete even if every expert moved along."
        )
    samples = [e.get("expert_sample") for e in rows]
    if before is not None and before.selection_bias is not None:
        bias = np.array([e["selection_bias"] for e in rows], dtype=np.float64)
        difference = bias - before.selection_bias[drift.place]
        left = np.abs(difference - np.median(difference)).max()
        if left > _BIAS_MOVED * max(spread_of(before.selection_bias), 1e-12):
            return False, "The selection bias did not move along."
    if before is None or before.samples is None or None in samples:
        return False, (
            "Whether the experts moved along is not known: their weights are not in the "
            "checkpoint, or not in the baseline."
        )
    same = sum(samples[i] == before.samples[drift.place[i]] for i in range(len(rows)))
    stayed = sum(samples[i] == before.samples[i] for i in range(len(rows)))
    if stayed < same == len(rows):
        return True, "Every expert moved along."
    return False, f"{stayed} of {len(rows)} experts are where they were: they did not move along."


#: What else than rows, gain and biases changed, of which a baseline holds one digest.
_PART = "part changed"


@check(
    "MGI128",
    "a router was changed as only a fault changes it",
    "error",
    ("weight_digest",),
    inputs="baseline",
    alike=same_sentence,
)
def changed_by_fault(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Nothing was done to a router since the baseline that only a fault does.

    Looked for: rows that are those of another layer or of no router of the baseline, copied over
    each other, negated, or multiplied by numbers to the last digit; biases that are zero, negated,
    scaled, rounded, of another layer or of other experts, or whose bytes were read as another
    dtype; a common offset of biases where dropped groups are filled with a number. Rows are
    compared by 32 seeded projections, biases as they are.

    A finding means: training leaves none of these; a conversion wrote other numbers than it read.
    Columns that were scaled, small rotations, updates of low rank and casts of rows look like
    training to a baseline (moegeom diff, with both checkpoints, tells them apart).

    What to do: compare with the source: moegeom diff SOURCE CHECKPOINT. Where the change is meant,
    write a new baseline (--update-baseline).
    """
    for row, drift in drifts(measured):
        for change in drift.changes:
            if change.severity is not None:
                subject = "the rows: " if change.subject == "rows" else ""
                text = change.text
                if change.word == _PART:
                    parts = measured.facts(row["router"]).get("parts", ())
                    text = f"the {' or the '.join(parts)} changed" if parts else text
                detail = change.meaning[:1].upper() + change.meaning[1:]
                yield changed_by_fault.finding(row["router"], f"{subject}{text}.", detail)
