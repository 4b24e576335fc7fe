"""MGI111: tables that look experts up by token id name distinct experts of their layer.

Looked for: ids that are stored as integers, between 0 and the number of experts, without repeats in
a row, as many as the rule chooses; and, among many ids above 256, odd ones: bfloat16 holds none.

A finding means: tokens of these layers go to experts that do not exist, twice to the same one, or
to another one than in training. Such layers have no router that could be measured instead.

What to do: take the table from the source again. Most likely the whole checkpoint was cast to
bfloat16, tables included: casts must leave integers alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from moegeom.checks.check import Check, Limits, Unknown
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.router import EXACT_IN_BFLOAT16, TokenTable
from moegeom.core.text import number_of

_INTEGERS = ("I", "U")

_FIELDS = tuple(field.name for field in dataclasses.fields(TokenTable))


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    for facts in measured.run.get("token_tables", ()):
        table = TokenTable(**{name: facts[name] for name in _FIELDS if name in facts})
        if table.reason:
            yield Unknown(table.router, f"'{table.tensor}' cannot be read: {table.reason}")
            continue
        wrong = list(_faults(table, _top_k(measured, table)))
        if wrong:
            used = f"{table.num_used:,} of {table.num_experts:,} experts are named"
            yield CHECK.finding(
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
    if top_k is not None and table.top_k != top_k:
        yield f"{number_of(table.top_k, 'expert')} for each token, and the rule chooses {top_k}"


def _top_k(measured: Measured, table: TokenTable) -> int | None:
    """How many experts the routers of the same stack choose; None where there is none."""
    stack = table.router.split("/")[0]
    listed = measured.run.get("routers", ())
    return next((r["top_k"] for r in listed if r["name"].split("/")[0] == stack), None)


CHECK = Check(
    "MGI111",
    "a table of experts by token id is broken",
    "error",
    _judge,
    facts="token_tables",
    absent="no layer looks experts up by token id",
)
