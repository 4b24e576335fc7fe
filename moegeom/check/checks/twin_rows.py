"""MGI104: no two experts share a router row.

Looked for: rows of one router that are equal bit for bit, biases included. Ties go to the lower
expert number, so the later twin is chosen only when the earlier one is chosen too, and alone never.
A merge that copied an expert, or a save that wrote a slice twice, leaves such rows; training
does not. Next: list the rows and compare the file with its source.
"""

from __future__ import annotations

from moegeom.check._check import Check, Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured) -> list[Finding]:
    findings = []
    for row in measured.layers:
        if not row.get("num_twin_rows"):
            continue
        router = row["router"]
        twins = [e for e in measured.experts[router] if e["twin_of"] not in (None, -1)]
        pairs = ", ".join(f"{e['twin_of']} and {e['expert']}" for e in twins[:3])
        slots = sum(e.get("num_slots") or 0 for e in twins)
        seen = row.get("num_tokens")
        on_tokens = f" Chosen {slots} times for {seen:,} tokens." if seen else ""
        more = f" and {len(twins) - 3} more pairs" if len(twins) > 3 else ""
        findings.append(
            Finding(
                "error",
                CHECK.code,
                (router,),
                f"experts {pairs}{more} are the same row; the later one is never chosen alone.",
                f"Bit-identical weights; ties go to the lower number.{on_tokens} "
                "A fault of the file, not of the data.",
                f"moegeom routers {measured.checkpoint} --layers {router.split('/')[1]}",
            )
        )
    return findings


CHECK = Check("MGI104", "two experts share a router row", "error", ("num_twin_rows",), _judge)
