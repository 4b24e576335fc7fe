"""MGB203: no expert takes several times its fair share.

Looked for: a busiest expert whose load is above several times the fair share by more than chance.

A finding means: this expert is the bottleneck wherever experts run on different devices, and others
are short of tokens. Load holds for the tokens it was measured on.

What to do: follow the expert over the training steps, and look at its row and its domains. The
limit is uncalibrated.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import NO_ERROR, Check, Limit, Limits, Tested, Unknown
from moegeom.checks.measured import Measured, Row
from moegeom.checks.statistics import p_above
from moegeom.core.intervals import range_text


def _evidence(measured: Measured, row: Row) -> str:
    router, expert = row["router"], row["busiest_expert"]
    experts = {e["expert"]: e for e in measured.experts[router]}
    domains = measured.domains.get(router, ())
    same = [d for d in domains if d["busiest_expert"] == expert]
    where = f" It leads in {len(same)} of {len(domains)} domains." if len(domains) > 1 else ""
    norm = experts[expert]["row_norm"]  # null for a row that is not finite
    ratio = norm / row["row_norm_median"] if norm and row["row_norm_median"] else 0.0
    length = f" Its row is {ratio:.1f}x the median length." if ratio else ""
    return where + length


def _judge(measured: Measured, limits: Limits) -> Iterator[Tested | Unknown]:
    for row in sorted(measured.layers, key=lambda row: -(row.get("max_vio_global") or 0.0)):
        router, vio = row["router"], row.get("max_vio_global")
        if vio is None:
            continue
        load, error, limit = 1.0 + vio, row.get("max_vio_global_se"), limits("fair_shares", router)
        if error is None:
            yield Unknown(router, NO_ERROR)
            continue
        expert = row["busiest_expert"]
        slots = {e["expert"]: e["num_slots"] for e in measured.experts[router]}[expert]
        share = slots / row["num_tokens"]
        told = range_text(load, error, row["num_blocks"], 1)
        finding = CHECK.finding(
            router,
            f"expert {expert} is chosen by {100 * share:.0f} % of the tokens.",
            f"It gets {load:.1f}x its fair share (limit {limit:.1f}, uncalibrated; 95 % range "
            f"over documents {told})." + _evidence(measured, row),
            measured.measure_again(router, extra="--per-token"),
        )
        freedom = row["num_blocks"] - 1
        # the largest load is that of an expert which every token chooses
        rows = measured.experts[router]
        room = len(rows) * row["num_tokens"] / sum(e["num_slots"] for e in rows) - limit
        p_value = p_above(load, limit, error, freedom)
        yield Tested(router, finding, p_value, error, freedom, room=room)


CHECK = Check(
    "MGB203",
    "one expert takes several fair shares",
    "warning",
    _judge,
    ("max_vio_global",),
    # From practice: healthy trained layers stay below 2.
    (Limit("fair_shares", 3.0, "largest load of an expert, in fair shares"),),
    inputs="tokens",
    absent="the tokens say nothing of load",
    detects=lambda shift: f"an expert {shift:.2f} fair shares above its limit",
)
