"""What every report of a sign-off says in the same words."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.report.differences import Side
from moegeom.report.header import size
from moegeom.report.signoffs._signoff import LineState, SignOff

#: How each state looks.
MOODS: dict[LineState, str] = {"failed": "error", "inconclusive": "warning", "passed": "good"}


def verdict_sentence(found: SignOff) -> str:
    """``signed off: all 4 lines passed.``, or the lines that stand in the way."""
    failed, unknown = (
        ", ".join(line.name for line in found.in_state(state))
        for state in ("failed", "inconclusive")
    )
    open_ones = f"; {unknown} inconclusive" if unknown else ""
    if failed:
        return f"not signed off: {failed} failed{open_ones}."
    if unknown:
        return f"not signed off yet: {unknown} inconclusive; nothing failed."
    return f"signed off: all {len(found.lines)} lines passed."


def mood(found: SignOff) -> str:
    """How the verdict looks: green only when every line passed."""
    return next(look for state, look in MOODS.items() if found.in_state(state))


def read_line(side: Side) -> str:
    """How many routers a side has, and how much of it was read."""
    if not side.bytes_total:
        return "its routers could not be read."
    plural = "" if side.num_routers == 1 else "s"
    part = side.bytes_read < side.bytes_total
    of = f" of {size(side.bytes_total)}" if part else ""
    tokens = f" Tokens: {side.tokens}." if side.tokens else ""
    return f"{side.num_routers} router{plural}, read {size(side.bytes_read)}{of}.{tokens}"


def ending(found: SignOff) -> Iterator[str]:
    """Notes, then what was not looked at."""
    yield from found.notes
    if found.not_looked_at:
        yield f"Not looked at: {'; '.join(found.not_looked_at)}."
