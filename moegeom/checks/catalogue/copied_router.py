"""MGI112: no two layers hold the same router.

Looked for: router weights of two places of the checkpoint that are equal bit for bit, other than
rows of zeros. A router that encoder and decoder share is read once, and is no copy.

A finding means: one layer was overwritten with the router of another, or a layer was copied whole.
Training leaves no two routers equal. Where the gains of the norm in front differ, the router alone
was copied, and its experts meet the tokens of another layer.

What to do: compare the layers with the source of the checkpoint. A model that was grown by
repeating layers has them on purpose until it is trained on: accept the code in a profile.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits
from moegeom.checks.measured import Measured, Row, place_of
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    alike: dict[str, list[Row]] = {}
    for row in _read(measured):
        if row["num_zero_rows"] < measured.facts(row["router"])["num_experts"]:  # MGI103 says so
            alike.setdefault(row["weight_digest"], []).append(row)
    for rows in alike.values():
        if len(rows) < 2:
            continue
        routers = tuple(row["router"] for row in rows)
        places = [place_of(router) for router in routers]
        yield CHECK.finding(
            routers,
            f"{', '.join(places[:-1])} and {places[-1]} hold the same router.",
            f"Their weights are equal bit for bit. {_gains(rows)} A fault of the file, not of the "
            "data.",
        )


def _read(measured: Measured) -> list[Row]:
    """Routers whose weight was read: of those that are listed alone nothing is known."""
    return [row for row in measured.layers if row["weight_digest"] is not None]


def _gains(rows: list[Row]) -> str:
    gains = {row["gain_digest"] for row in rows}
    if None in gains:
        return "No gain in front tells whether more of the layer was copied."
    if len(gains) == 1:
        return "So are the gains of the norm in front: the layer may have been copied whole."
    return "The gains of the norm in front differ: the router alone was copied."


CHECK = Check(
    "MGI112",
    "two layers hold the same router",
    "error",
    _judge,
    ("weight_digest",),
    absent="no weight was read",
    too_little=lambda measured: (
        "one router is compared with no other" if len(_read(measured)) < 2 else ""
    ),
)
