"""The page docs/museum.md, from what the gate says when it is shown every incident."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.museum.gallery import SIZES, Case, Incident, Museum, Seen
from tests.museum.incidents import INCIDENTS
from tests.museum.invariances import MODELS, NEUTRAL, applicable, changed

PAGE = Path(__file__).resolve().parents[2] / "docs/museum.md"

_HEAD = """\
# The museum of incidents

Things that went wrong in public, rebuilt in the small: each in three sizes, and with a healthy twin
that was treated alike but rightly. `moegeom check` sees the weights only, in most cases without a
baseline. `tests/museum/refresh_museum.py` writes this page from what the gate says, and a test
keeps it true: a size that is missed stays here as missed.

Read a cell as: what was done, then what the gate says. **Bold** is the code that names the cause;
other codes beside it are true as well, or follow from the same cause.
"""

_INVARIANCES = """\
## Changes that change no choice

What the gate says after changes that leave every choice as it was, without and with a baseline of
the checkpoint before. "silent" is right everywhere. A shift or a factor common to all rows is
neutral for a softmax only.
"""


def render(museum: Museum) -> str:
    """The page."""
    blocks = [_HEAD, _summary(museum)]
    blocks += [_incident(museum, incident) for incident in INCIDENTS]
    blocks += [_INVARIANCES + "\n" + "\n".join(_invariances(museum)) + "\n"]
    return "\n".join(blocks)


def _summary(museum: Museum) -> str:
    lines = [
        "| incident | code expected | small | medium | large | twins |",
        "|---|---|---|---|---|---|",
    ]
    for incident in INCIDENTS:
        found = [_mark(incident, museum.visit(incident, case)) for case in incident.sizes]
        alarms = sum(bool(museum.visit(incident, twin).codes) for twin in incident.twins)
        twins = f"{alarms} of {len(incident.twins)} not silent" if alarms else "silent"
        link = f"[{_title(incident)}](#{incident.name.replace('_', '-')})"
        lines.append(f"| {link} | {incident.code} | {' | '.join(found)} | {twins} |")
    return "\n".join(lines) + "\n"


def _mark(incident: Incident, seen: Seen) -> str:
    return "found" if incident.code in seen.codes else "missed"


def _title(incident: Incident) -> str:
    return incident.name.replace("_", " ")


def _incident(museum: Museum, incident: Incident) -> str:
    threads = ", ".join(f"[{thread}]({_address(thread)})" for thread in incident.threads)
    compared = " Compared with a baseline." if incident.baseline else ""
    lines = [
        f"## {incident.name.replace('_', '-')}",
        "",
        f"{incident.story}{compared}{f' See {threads}.' if threads else ''}",
        "",
        "| | what was done | what the gate says |",
        "|---|---|---|",
    ]
    lines += [
        _row(size, case, museum.visit(incident, case), incident.code)
        for size, case in zip(SIZES, incident.sizes, strict=True)
    ]
    lines += [_row("twin", twin, museum.visit(incident, twin), "") for twin in incident.twins]
    return "\n".join(lines) + "\n"


def _address(thread: str) -> str:
    repository, _, number = thread.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


def _row(name: str, case: Case, seen: Seen, code: str) -> str:
    said = ", ".join(f"**{c}**" if c == code else c for c in seen.codes) or "silent"
    missed = f" ({code} missed)" if code and code not in seen.codes else ""
    alarm = " (false alarm)" if not code and seen.codes else ""
    failed = "; exit 1" if seen.exit_code else ""
    return f"| {name} | {case.text} | {said}{missed}{alarm}{failed} |"


def _invariances(museum: Museum) -> Iterator[str]:
    yield f"| | {' | '.join(MODELS)} |"
    yield "|---" * (len(MODELS) + 1) + "|"
    pairs = set(applicable())
    for change, neutral in NEUTRAL.items():
        cells = []
        for model in MODELS:
            if (change, model) not in pairs:
                cells.append("not neutral")
                continue
            new, old = changed(change, model)
            alone, compared = museum.show(new).codes, museum.show(new, old).codes
            said = [", ".join(alone)] if alone else []
            said += [f"with baseline {', '.join(compared)}"] if compared != alone else []
            cells.append("; ".join(said) or "silent")
        yield f"| {neutral.text} | {' | '.join(cells)} |"
