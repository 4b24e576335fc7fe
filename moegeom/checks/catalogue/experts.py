"""Experts: those that cannot be chosen, that always are, and that are alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from math import isinf
from typing import Any

from moegeom.checks.check import OLDER, Limits, Unknown, check, without_saying
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.router import EXACT_IN_BFLOAT16, TokenTable
from moegeom.core.text import all_of, listed, number_of


@check(
    "MGI110",
    "experts can never be chosen, or never lose",
    "error",
    ("num_unreachable",),
    absent="nothing is derived for the norm in front",
    concerns=without_saying,
    severities={"training": "warning"},
)
def unreachable(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Some input reaches every expert, and some input leaves it out.

    Looked for: experts that no input leaves out, and experts that at least k others, named as the
    certificate, beat for every input that the norm in front lets through. Reachable experts are
    proved by a point, or by affine independence of the rows; what is neither is counted as open and
    is no finding.

    A finding means: the expert can never be chosen, or never lose, whatever the tokens are. Its
    bias is too low, or too high, for its row.

    What to do: look at the selection bias. One that ran away in training, or lost its centre, shuts
    experts out for good.
    """
    for row in sorted(measured.layers, key=lambda row: -(row.get("num_unreachable") or 0)):
        router = row["router"]
        rows = measured.experts[router]
        always = [e["expert"] for e in rows if e.get("is_certain")]
        if always:
            yield unreachable.finding(
                router,
                f"{len(always)} of {len(rows)} experts are chosen for every input: expert "
                f"{listed(always)}.",
                "They beat so many others wherever the input lies that they cannot lose.",
            )
        shut = [e for e in rows if e["reach"] == "beaten everywhere"]
        if not shut:
            continue
        first = shut[0]
        yield unreachable.finding(
            router,
            f"{len(shut)} of {len(rows)} experts can never be chosen: expert "
            f"{listed([e['expert'] for e in shut])}.",
            f"Certificate: {number_of(first['num_beaten_by'], 'expert beats', 'experts beat')} "
            f"expert {first['expert']} for every input ({listed(first['beaten_by'])}). "
            f"Proved reachable: {row['num_reachable']}, open: {row['num_reach_open']}.",
        )


@check("MGI109", "every expert is chosen", "error")
def nothing_routed(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Fewer experts are chosen than there are.

    Looked for: routers whose rule chooses as many experts as they have rows.

    A finding means: every token goes to every expert. Nothing is routed, and no figure about
    choices says anything; only routing weights still depend on the router.

    What to do: look at the number of chosen experts in the config, or at --top-k. A pruned model
    may have kept the number that it had before.
    """
    whole: dict[int, list[str]] = {}
    for row in measured.layers:
        facts = measured.facts(row["router"])
        if facts and facts["top_k"] == facts["num_experts"]:
            whole.setdefault(facts["num_experts"], []).append(row["router"])
    for experts, routers in whole.items():
        yield nothing_routed.finding(
            tuple(routers),
            f"{all_of(experts, 'expert is', 'experts are')} chosen for every token.",
            "Nothing is routed: loads are even whatever the weights are.",
        )


#: Scores that are never below 0.
_POSITIVE = ("sigmoid", "softmax", "sqrt_softplus")


def _too_little(measured: Measured) -> str:
    masked = _masked(measured)
    if any("num_kept_groups" not in facts for facts in masked):
        return OLDER
    return "" if masked else "no rule drops groups"


@check(
    "MGN120",
    "an expert of a dropped group can be chosen where it is filled with 0.0",
    "warning",
    too_little=_too_little,
    severities={"release": "error"},
)
def dropped_groups_win(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """No expert of a dropped group can be chosen, whatever is written over its score.

    Looked for: in rules that keep g of G groups, g groups that hold fewer than k experts whose
    selection bias is 0 or more. Scores are above 0, so such experts always beat a dropped one at
    0.0; with fewer than k of them, a token whose scores are small chooses from a dropped group.

    A finding means: with dropped groups at 0.0 (older engines, some kernels) experts of dropped
    groups are chosen, with them at -inf they are not: two engines differ in this alone. Where the
    rule of the family itself fills with 0.0 it happens in its own engine. Whether tokens get there
    depends on their scores (``fill_decides_share`` of a scan counts them), so this is a warning.

    What to do: fill with -inf in every engine, or add a constant to all biases of the layer that
    makes them positive: with -inf it changes no choice, and with 0.0 it takes the fault away.
    """
    entries = []
    for facts in _masked(measured):
        rows = measured.experts.get(facts["name"], ())
        biases = [bias for e in rows if (bias := e.get("selection_bias")) is not None]
        if facts["score"] not in _POSITIVE or not facts["has_selection_bias"]:
            continue
        if len(biases) < len(rows):
            yield Unknown(facts["name"], "not all of its selection biases are known")
            continue
        size = len(biases) // facts["num_groups"]
        safe = [
            sum(bias >= 0.0 for bias in biases[start : start + size])
            for start in range(0, len(biases), size)
        ]
        fewest = sum(sorted(safe)[: facts["num_kept_groups"]])
        if fewest < facts["top_k"]:
            entries.append((fewest, min(biases), facts))
    for fewest, least, facts in sorted(entries, key=lambda entry: entry[:2]):
        num_kept, groups, k = facts["num_kept_groups"], facts["num_groups"], facts["top_k"]
        is_own = not isinf(float(facts["group_fill"]))
        whose = "as this family's own rule does" if is_own else "as some engines do"
        yield dropped_groups_win.finding(
            facts["name"],
            f"{num_kept} of {groups} groups may hold {number_of(fewest, 'expert')} sure to beat "
            f"0.0, fewer than the {k} to choose.",
            f"Biases go down to {least:.3g}. Where dropped groups are filled with 0.0, {whose}, a "
            f"dropped expert wins once the other scores are below {-least:.3g}.",
        )


def _masked(measured: Measured) -> list[Mapping[str, Any]]:
    """Facts of the routers whose rule drops groups."""
    routers = measured.run.get("routers", ())
    return [facts for facts in routers if facts.get("group_fill") is not None]


_INTEGERS = ("I", "U")

_FIELDS = tuple(field.name for field in dataclasses.fields(TokenTable))


@check(
    "MGI111",
    "a table of experts by token id is broken",
    "error",
    facts="token_tables",
    absent="no layer looks experts up by token id",
)
def token_tables(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """Tables that look experts up by token id name distinct experts of their layer.

    Looked for: ids that are stored as integers, between 0 and the number of experts, without
    repeats in a row, as many as the rule chooses, one row for each token id of the config; among
    many ids above 256, odd ones: bfloat16 holds none; and rows of the router that weigh the
    experts, of zeros or not finite.

    A finding means: tokens of these layers go to experts that do not exist, twice to the same one,
    or to another one than in training. No router could be measured instead.

    What to do: take the table from the source again. Most likely the whole checkpoint was cast to
    bfloat16: casts must leave integers alone.
    """
    for facts in measured.run.get("token_tables", ()):
        table = TokenTable(**{name: facts[name] for name in _FIELDS if name in facts})
        if table.reason:
            yield Unknown(table.router, f"'{table.tensor}' cannot be read: {table.reason}")
            continue
        stack, routers = table.router.split("/")[0], measured.run.get("routers", ())
        top_k = next((r["top_k"] for r in routers if r["name"].split("/")[0] == stack), None)
        wrong = list(_faults(table, top_k))
        if wrong:
            used = f"{table.num_used:,} of {table.num_experts:,} experts are named"
            yield token_tables.finding(
                table.router,
                f"token table '{table.tensor}': {wrong[0]}.",
                "; ".join([*wrong[1:], used]).capitalize() + ".",
            )


def _faults(table: TokenTable, top_k: int | None) -> Iterator[str]:
    rows = f"of {table.num_tokens:,} rows"
    if table.is_rounded:
        yield (
            f"not one of {table.num_large:,} ids above {EXACT_IN_BFLOAT16} is odd: it went through "
            "bfloat16"
        )
    if table.num_outside:
        yield (
            f"{number_of(table.num_outside, 'id is', 'ids are')} no expert (largest "
            f"{table.largest:g}, experts 0 to "
            f"{table.num_experts - 1})"
        )
    if table.num_repeated:
        yield f"{table.num_repeated:,} {rows} name an expert twice"
    if not table.dtype.startswith(_INTEGERS):
        yield f"ids are stored as {table.dtype.lower()}, which is no integer type"
    if table.num_tokens < table.num_ids:
        yield f"it has {table.num_tokens:,} rows, and the config {table.num_ids:,} token ids"
    if table.weight_state:
        yield f"the router weight beside it {table.weight_state}"
    if top_k is not None and table.top_k != top_k:
        yield f"{number_of(table.top_k, 'expert')} for each token, and the rule chooses {top_k}"
