"""The page docs/disagreements.md, from what explain says of every pair."""

from __future__ import annotations

from pathlib import Path

from tests.museum.disagreement import Disagreement, Hall, Pair
from tests.museum.disagreements import DISAGREEMENTS

PAGE = Path(__file__).resolve().parents[2] / "docs/disagreements.md"

_HEAD = """\
# Disagreements, explained

The second half of the [museum](museum.md): two runs that chose other experts for the same tokens,
rebuilt in the small for the reason that people found in the end, with twins that merely look alike.
`moegeom explain A --tokens REC_A --run-b REC_B` ([explain.md](explain.md)) sees what the two runs
recorded and nothing else; B is computed by an engine written for this page, with torch.
`tests/museum/refresh_disagreements.py` writes this page from what it says, and a test keeps every
verdict true.
"""


def render(hall: Hall) -> str:
    """The page."""
    return "\n".join([_HEAD, *(_disagreement(hall, d) for d in DISAGREEMENTS)])


def _disagreement(hall: Hall, disagreement: Disagreement) -> str:
    threads = ", ".join(
        f"[{thread}](https://github.com/{thread.replace('#', '/issues/')})"
        for thread in disagreement.threads
    )
    lines = [
        f"## {disagreement.name.replace('_', '-')}",
        "",
        f"{disagreement.story}{f' See {threads}.' if threads else ''}",
        "",
        "| | what was done | sets that differ | verdict |",
        "|---|---|---|---|",
        *(_row("", pair, hall) for pair in disagreement.pairs),
        *(_row("twin", pair, hall) for pair in disagreement.twins),
    ]
    return "\n".join(lines) + "\n"


def _row(kind: str, pair: Pair, hall: Hall) -> str:
    found = hall.explained(pair)
    share = 100.0 * (1.0 - found.agreement)
    begins = found.verdict.router.partition("/")[2]
    where = f", from layer {begins} on" if begins and not kind else ""
    wrong = "" if found.verdict.cause == pair.cause else " (WRONG)"
    differ = "none" if share == 0.0 else f"{share:.1g} %" if share < 10 else f"{share:.0f} %"
    return f"| {kind} | {pair.text} | {differ} | **{found.verdict.cause}**{where}{wrong} |"
