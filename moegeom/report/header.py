"""The lines above the verdict: what was read, and how far it can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.report.summary import Summary


def size(num_bytes: float) -> str:
    """Bytes in the unit that a person would use."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def duration(seconds: float) -> str:
    """Seconds, or milliseconds below a tenth."""
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"


def rule_line(summary: Summary) -> str:
    """The rule in words, and whether distances are exact for it."""
    checkpoint, routers = summary.run["checkpoint"], summary.run["routers"]
    affine = sum(router["is_affine"] for router in routers)
    if affine == len(routers):
        walls = "Walls are straight: distances are exact."
    elif affine == 0:
        walls = "Walls are curved or grouped: margins only."
    else:
        walls = f"Walls are straight in {affine} of {len(routers)} routers."
    return f"{checkpoint['family']}: {checkpoint['rule']}. {walls}"


def routers_line(summary: Summary) -> str:
    """How many routers, how much was read, how they are stored."""
    checkpoint = summary.run["checkpoint"]
    found, expected = checkpoint["num_routers"], checkpoint["num_expected"]
    count = f"{found} found" if expected is None else f"{found} of {expected} expected"
    looked = len(summary.run["routers"])
    only = f" ({looked} looked at)" if looked < found else ""
    dtypes = sorted({router["stored_dtype"] for router in summary.run["routers"]})
    read, total = checkpoint["bytes_read"], checkpoint["bytes_total"]
    part = f"{size(read)} of {size(total)}" if read < total else f"all {size(read)}"
    return (
        f"{count}{only}. Read {part} in {duration(checkpoint['seconds'])}. "
        f"Stored {', '.join(dtypes).lower()}."
    )


def tokens_line(summary: Summary) -> str:
    """Which tokens, from where."""
    tokens, trust = summary.run["tokens"], summary.run["trust"] or {}
    if tokens is None:
        return "none"
    if tokens["is_synthetic"]:
        return (
            f"{tokens['num_tokens']:,} drawn from {tokens['name']}: geometry only, "
            "no load, no entropy"
        )
    documents = tokens["num_documents"]
    where = f" in {documents:,} documents" if documents else ""
    origin = {
        "matches": "recorded from this checkpoint (fingerprint matches)",
        "differs": "RECORDED FROM ANOTHER CHECKPOINT (stale inputs allowed)",
        "unknown": "from a file that does not name its checkpoint",
    }[trust.get("fingerprint", "unknown")]
    return (
        f"{tokens['num_tokens']:,}{where}, {origin}. {size(tokens['size_bytes'])}, "
        f"{duration(summary.run['seconds'])}"
    )


def trust_line(summary: Summary) -> str:
    """Recorded choices, RMS of the inputs, and whether the rule is verified or assumed."""
    run = summary.run
    said = [_choices(summary)]
    trust: Mapping[str, Any] = run["trust"] or {}
    if trust.get("rms_median") is not None:
        said.append(f"Inputs are router inputs (rms {trust['rms_median']:.3f}).")
    elif run["tokens"] and run["tokens"]["stage"] != "router_input":
        said.append(f"Recorded stage: {run['tokens']['stage'].replace('_', ' ')}.")
    if trust.get("overridden"):
        said.append(f"{len(trust['overridden'])} failed test allowed: {trust['overridden'][0]}")
    return " ".join(said)


def _choices(summary: Summary) -> str:
    rows = [row for row in summary.layers if row.get("num_reproduced") is not None]
    if not rows:
        return "rule assumed from config (no recorded choices)."
    reproduced = sum(row["num_reproduced"] for row in rows)
    near = sum(row["num_near_tie"] for row in rows)
    beyond = sum(row["num_not_reproduced"] for row in rows)
    text = f"recorded choices reproduced: {reproduced:,} of {reproduced + near + beyond:,}"
    if near:
        text += f", {near:,} within rounding of a tie"
    if beyond:
        text += f", {beyond:,} NOT"
    return f"{text}."
