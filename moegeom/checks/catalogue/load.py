"""Load: how tokens are spread over the experts, by itself and beside a baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moegeom.checks.catalogue.tokens import MOST_PULL, mean_decides
from moegeom.checks.check import NO_ERROR, Check, Limit, Limits, Tested, Unknown, check
from moegeom.checks.figure import Figure, change_check, difference_error, figure_check
from moegeom.checks.measured import MeanPull, Measured
from moegeom.checks.statistics import p_above
from moegeom.core.finding import MOST_FAIR_SHARES
from moegeom.core.shapes import Int64
from moegeom.core.text import listed, number_of

#: From 30 expected choices on, an even router keeps each expert four sigmas above a tenth.
_EXPECTED = Limit("expected_choices", 30.0, "least choices of an expert to be judged", "random")


@check(
    "MGB201",
    "experts are dead",
    "warning",
    ("underused_share",),
    limits=(_EXPECTED,),
    inputs="tokens",
    absent="the tokens say nothing of load",
    severities={"release": "error"},
)
def dead_experts(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
    """Every expert is chosen by some token.

    Looked for: experts that no token chose. A small set of tokens leaves experts out, so fewer than
    30 expected choices are not judged; the finding says what chance alone explains.

    A finding means: on these tokens the expert does nothing. It may serve a domain that they lack.

    What to do: measure more tokens of other domains, then earlier checkpoints.
    """
    yield from _with_few(measured, dead_experts, limits, 0.0)


@check(
    "MGB204",
    "experts are underused",
    "warning",
    ("underused_share",),
    limits=(Limit("fair_share", 0.1, "least load in fair shares"), _EXPECTED),
    inputs="tokens",
    absent="the tokens say nothing of load",
)
def underused_experts(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
    """Every expert that is chosen gets a tenth of its fair share.

    Looked for: experts whose load is below a tenth of the fair share by more than chance; those
    without a token are MGB201. Fewer than 30 expected choices are not judged.

    A finding means: these experts serve few tokens, and learn from few.

    What to do: measure more tokens of other domains; `moegeom imbalance` says why.
    """
    yield from _with_few(measured, underused_experts, limits, None)


def _with_few(
    measured: Measured, of: Check, limits: Limits, most: float | None
) -> Iterator[Tested | Unknown]:
    """Of each layer, the worst first, what is claimed of experts with a load of at most ``most``;
    None: with some, and less than the limit.
    """
    by_share = sorted(measured.layers, key=lambda row: -(row.get("underused_share") or 0.0))
    for row in by_share:
        router = row["router"]
        rows = measured.experts[router]
        fair = sum(e["num_slots"] or 0 for e in rows) / len(rows)
        least = limits("expected_choices", router)
        if row.get("underused_share") is None:
            continue
        if fair < least:
            few = f"{fair:,.3g} choices expected of each expert; needed: {least:g}, of more tokens"
            yield Unknown(router, few)
            continue
        limit = limits("fair_share", router) if most is None else most
        low = [e for e in rows if (0.0 < e["load"] < limit if most is None else e["load"] <= most)]
        if not low:
            yield Tested(router, None, 1.0)
            continue
        if most is None and row["num_blocks"] < 2:
            yield Unknown(router, NO_ERROR)
            continue
        names = f"expert{'s' * (len(low) > 1)} {listed([e['expert'] for e in low])}"
        state, share = (
            ("underused", f"< {100 * limit:g} %") if most is None else ("dead", "nothing")
        )
        finding = of.finding(
            router,
            f"{len(low)} of {len(rows)} experts {'is' if len(low) == 1 else 'are'} {state} here.",
            f"{names.capitalize()} get{'s' * (len(low) == 1)} {share} of an even share "
            f"({fair:,.0f} choices); chance alone explains down to "
            f"{fair - 4 * math.sqrt(fair):,.0f}.",
        )
        freedom = row["num_blocks"] - 1
        p_values = [p_above(-e["load"], -limit, e["load_se"] or 0.0, freedom) for e in low]
        # the least of the layer's p-values, for as many experts as were looked at; no choice at all
        # where 30 were expected is beyond chance
        yield Tested(router, finding, min(1.0, len(rows) * min(p_values)) if most is None else 0.0)


@figure_check(
    "MGB202",
    "the load is spread over few experts",
    "load_entropy_normalised",
    Limit("entropy", 0.8, "least load entropy over log E"),
    detects=lambda shift: f"a load entropy {shift:.3f} below its limit",
    room=lambda figure: figure.limit,
    absent="the tokens say nothing of load",
    sign=-1.0,
)
def uneven_load(figure: Figure) -> tuple[str, str]:
    """The load is spread over the experts.

    Looked for: the entropy of the load over log E, 1 for even load.

    A finding means: on these tokens the layer works as if it had far fewer experts (exp of the
    entropy says how many).

    What to do: look at the busiest experts and their domains; follow the entropy over training. The
    limit is heuristic.
    """
    router, effective = figure.row["router"], figure.row["effective_experts"]
    at_work = number_of(len(figure.measured.experts[router]), "expert does", "experts do")
    return (
        f"load entropy {figure.value:.2f} of 1: {effective:.1f} of {at_work} the work.",
        f"Limit {figure.limit:g}, {figure.basis(2)}.",
    )


def _room(figure: Figure) -> float:
    """The largest load is that of an expert which every token chooses."""
    rows = figure.measured.experts[figure.row["router"]]
    slots = sum(e["num_slots"] for e in rows)
    return len(rows) * figure.row["num_tokens"] / slots - figure.limit


@figure_check(
    "MGB203",
    "one expert takes several fair shares",
    "max_vio_global",
    Limit("fair_shares", MOST_FAIR_SHARES, "largest load of an expert, in fair shares"),
    detects=lambda shift: f"an expert {shift:.2f} fair shares above its limit",
    room=_room,
    absent="the tokens say nothing of load",
    offset=1.0,
    extra="--per-token",
    severities={"release": "error"},
)
def overload(figure: Figure) -> tuple[str, str]:
    """No expert takes several times its fair share.

    Looked for: a busiest expert whose load is above several times the fair share by more than
    chance.

    A finding means: this expert is the bottleneck wherever experts run on different devices, and
    others are short of tokens. Load holds for the tokens it was measured on.

    What to do: follow the expert over the training steps, and look at its row and its domains. The
    limit is heuristic.
    """
    row = figure.row
    router, expert = row["router"], row["busiest_expert"]
    busiest = {e["expert"]: e for e in figure.measured.experts[router]}[expert]
    domains = figure.measured.domains.get(router, ())
    same = [d for d in domains if d["busiest_expert"] == expert]
    where = f" It leads in {len(same)} of {len(domains)} domains." if len(domains) > 1 else ""
    norm = busiest["row_norm"]  # missing for a row that is not finite
    ratio = norm / row["row_norm_median"] if norm and row["row_norm_median"] else 0.0
    length = f" Its row is {ratio:.1f}x the median length." if ratio else ""
    share = busiest["num_slots"] / row["num_tokens"]
    pull = MeanPull.of(row)
    cause = ""
    if pull is not None and pull.is_above(MOST_PULL):
        cause = f" The mean input decides much of the choice there ({mean_decides.code})."
    evidence = f"(limit {figure.limit:.1f}, {figure.basis(1)}).{where}{length}{cause}"
    return (
        f"expert {expert} is chosen by {100 * share:.0f} % of the tokens.",
        f"It gets {figure.value:.1f}x its fair share {evidence}",
    )


def _no_parts(measured: Measured) -> str:
    """Why no part can be told from the others; empty where one can at some router."""
    parts = measured.run.get("text_parts", ())
    if any(part["num_tests"] for part in parts):
        return ""
    if not parts:
        return "choices of k of more than 2 k experts are not known token by token"
    unit = ("document", "") if parts[0]["has_documents"] else ("run of tokens", "runs of tokens")
    return f"{number_of(parts[0]['units'], *unit)}; needed: 9 at least, or two domains"


@check(
    "MGB205",
    "a part of the text lies on few experts",
    "warning",
    inputs="tokens",
    too_little=_no_parts,
)
def part_on_few_experts(measured: Measured, limits: Limits) -> Iterator[Tested]:
    """No part of the text lies on few experts.

    Looked for: a domain that lies on half of the experts at most (heuristic) that the other domains
    lie on in effect (exp of the entropy, median), by more than chance; a document, or a run of
    neighbours (of runs of 256 tokens where documents are not known), whose tokens lie on half of
    what those of the other documents lie on (one over the probability that two tokens of a document
    meet in an expert), by more than documents differ and twice as far as any other.

    A finding means: nearly all text of one kind goes to a few experts, which are overloaded
    wherever such text comes in batches. Loads of the whole hide it. Text that repeats itself looks
    alike.

    What to do: read that part of the text; if it is ordinary, look at MaxVio on that kind of text
    alone, and balance within sequences or by domain. `moegeom track` tells since when (MGT204).
    """
    tested = []
    for part in measured.run.get("text_parts", ()):
        router, low = part["router"], part["low"]
        lies = low and part_on_few_experts.finding(
            router,
            f"{low['place']} lies on few experts.",
            f"On {low['effective']:.1f} in effect, the other text on {low['others']:.1f}. Read "
            "that part: text that repeats itself looks alike.",
            measured.measure_again(router),
        )
        if part["num_tests"]:
            tested.append(Tested(router, lies or None, low.get("p_value", 1.0)))
    yield from sorted(tested, key=lambda one: one.p_value)


@change_check(
    "MGB401",
    "the load is not as even as it was",
    "load_cv_ddof0",
    Limit("change", 0.03, "largest change of the load CV"),
    detects=lambda shift: f"a load CV that changed by {shift:.3f} more than its limit",
    largest=10.0,
    absent="the tokens say nothing of load",
)
def load_changed(old: float, new: float) -> str:
    """The load of a layer is as uneven as it was.

    Looked for: the coefficient of variation of the load beside that of the baseline; a change
    counts when it is beyond the limit by more than chance.

    A finding means: experts are used more, or less, evenly than when the baseline was made. On
    other tokens that says nothing about the checkpoint: compare equal mixtures of text.

    What to do: look which experts moved (MGB402) and in which domains.
    """
    return f"load CV {new:.3f}; the baseline has {old:.3f}."


def _places_in_baseline(measured: Measured, router: str) -> Int64[np.ndarray, "experts"]:
    """The expert of the baseline that each expert is, if its row was renumbered."""
    drift = measured.drifts.get(router)
    if drift is None or len(set(drift.place.tolist())) < len(drift.place):
        return np.arange(len(measured.experts[router]))
    return drift.place


@check(
    "MGB402",
    "an expert does not carry the load it did",
    "warning",
    ("load_cv_ddof0",),
    limits=(Limit("change", 0.1, "largest change of an expert's load, in fair shares"),),
    inputs="baseline and tokens",
    absent="the tokens say nothing of load",
    detects=lambda shift: (
        f"an expert's load that changed by {shift:.2f} fair shares more than its limit"
    ),
    severities={"training": "note"},
)
def expert_load_changed(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
    """Every expert carries the load it did.

    Looked for: the load of each expert, in fair shares, beside that of the baseline; a change
    counts when it is beyond the limit by more than chance, with as many tests counted as there are
    experts.

    A finding means: tokens moved from some experts to others, even where the load is as even as
    before. On other tokens that says nothing about the checkpoint: compare equal mixtures of text.

    What to do: look at the rows of these experts (MGG401) and at the norm in front.
    """
    for row in measured.layers:
        router = row["router"]
        before = measured.before(router)
        rows = measured.experts[router]
        if before is None or row.get("load_cv_ddof0") is None:
            continue
        if before.load is None:
            yield Unknown(router, "the baseline holds no load of its experts")
            continue
        if before.load_error is None or any(e["load_se"] is None for e in rows):
            yield Unknown(router, NO_ERROR)
            continue
        if len(rows) != len(before.load):
            continue  # MGI124 says so
        place = _places_in_baseline(measured, router)
        limit, tests = limits("change", router), len(rows)
        tested = []
        for e in rows:
            old, old_error = (
                float(x[place[e["expert"]]]) for x in (before.load, before.load_error)
            )
            both, freedom = difference_error(row, before, e["load_se"], old_error)
            p_value = p_above(abs(e["load"] - old), limit, both, freedom)
            tested.append((p_value, e["expert"], old, e["load"], both, freedom))
        tested.sort()
        p_value, expert, old, new, both, freedom = tested[0]
        finding = expert_load_changed.finding(
            router,
            f"expert {expert} gets {new:.2f} fair shares; the baseline has {old:.2f}.",
            f"Standard error of the difference {both:.2g}; limit {limit:g}, heuristic. Next: "
            + ", ".join(f"expert {e} {a:.2f} -> {b:.2f}" for _, e, a, b, *_ in tested[1:4])
            + ".",
            measured.measure_again(router),
        )
        p_value = min(1.0, 2.0 * tests * p_value)
        yield Tested(router, finding, p_value, both, freedom, 2 * tests, float(tests))


@change_check(
    "MGB403",
    "the load entropy is not what it was",
    "load_entropy_normalised",
    Limit("change", 0.01, "largest change of the load entropy over log E"),
    detects=lambda shift: f"a load entropy that changed by {shift:.4f} more than its limit",
    largest=1.0,
    absent="the tokens say nothing of load",
)
def entropy_changed(old: float, new: float) -> str:
    """The load entropy of a layer is what it was.

    Looked for: the entropy of the load over log E beside that of the baseline; a change counts when
    it is beyond the limit by more than chance.

    A finding means: the layer uses more, or fewer, of its experts than when the baseline was made.
    On other tokens that says nothing about the checkpoint: compare equal mixtures of text.

    What to do: look which experts moved (MGB402) and in which domains.
    """
    return f"load entropy {new:.4f} of 1; the baseline has {old:.4f}."
