"""MGI104: no two experts share a router row.

Looked for: rows of one router that are equal bit for bit, biases included.

A finding means: the scores of the two are equal for every token, and ties go to the lower number:
without groups the later one is never chosen alone. A merge that copied an expert, or a save that
wrote a slice twice, leaves such rows; training does not.

What to do: list the rows and compare the file with its source.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.text import number_of


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    for row in measured.layers:
        if not row.get("num_duplicate_rows"):
            continue
        router = row["router"]
        duplicates = [e for e in measured.experts[router] if e["duplicate_of"] not in (None, -1)]
        pairs = ", ".join(f"{e['duplicate_of']} and {e['expert']}" for e in duplicates[:3])
        rest = number_of(len(duplicates) - 3, "more expert")
        more = f" and {rest} like an earlier one" if len(duplicates) > 3 else ""
        slots = [e["num_slots"] for e in duplicates if e.get("num_slots") is not None]
        on_tokens = (
            f" Chosen {sum(slots):,} times for {number_of(row['num_tokens'], 'token')}."
            if slots
            else ""
        )
        yield CHECK.finding(
            router,
            f"experts {pairs}{more} are the same row: no token tells them apart.",
            f"Bit-identical weights and biases; ties go to the lower number.{on_tokens} "
            "A fault of the file, not of the data.",
        )


CHECK = Check("MGI104", "two experts share a router row", "error", _judge, ("num_duplicate_rows",))
