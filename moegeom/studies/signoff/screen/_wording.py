"""What every report of a sign-off says in the same words."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.document.header import size
from moegeom.studies.diff.screen import Side
from moegeom.studies.signoff.screen._signoff import LineState, SignOff

#: How each state looks.
MOODS: dict[LineState, str] = {
    "failed": "error",
    "inconclusive": "warning",
    "not judged": "warning",
    "passed": "good",
}


def verdict_sentence(found: SignOff) -> str:
    """``signed off: all 4 lines passed; 3 things not looked at.``, or what stands in the way."""
    told = {
        state: ", ".join(line.name for line in lines)
        for state in MOODS
        if state != "passed" and (lines := found.in_state(state))
    }
    unseen = _unseen(found)
    if not told:
        return f"signed off: all {len(found.lines)} lines passed{unseen}."
    stands = "; ".join(f"{names} {state}" for state, names in told.items())
    if "failed" in told:
        return f"not signed off: {stands}{unseen}."
    missing = "give --max-switched (or --null); " if "not judged" in told else ""
    return f"not signed off: {missing}{stands}; nothing failed{unseen}."


def _unseen(found: SignOff) -> str:
    """How many of the things listed at the end nobody looked at."""
    number = len(found.not_looked_at)
    if not number:
        return ""
    return f"; {number} thing{'' if number == 1 else 's'} not looked at"


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
