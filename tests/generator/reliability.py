"""Is a verdict with a margin of so many bits right as often as that says?

`python -m tests.generator.reliability SIZE FIRST LAST [SIZE FIRST LAST ...]` explains the cases of
these seeds with their twins, and prints the table of docs/explain.md.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.generator.scoring import HEALTHY, OPEN, Scored, all_scored

#: Least margins of the classes, in bits.
CLASSES = (10.0, 30.0, 100.0, 300.0, 1000.0)


@dataclass(frozen=True)
class Reliability:
    """Verdicts with margins from ``least`` to below ``most`` bits, and how many were right."""

    least: float
    most: float
    number: int
    right: int


def named(found: Iterable[Scored]) -> Iterator[tuple[float, bool]]:
    """Margins of verdicts that name a fault, and whether it is there; a twin may be rounded."""
    for one in found:
        for verdict, is_right in (
            (one.verdict, one.outcome == "named"),
            (one.twin, one.twin_outcome == "rounding"),
        ):
            if verdict.margin is not None and verdict.cause not in OPEN | HEALTHY:
                yield verdict.margin, is_right


def reliability(verdicts: Iterable[tuple[float, bool]]) -> list[Reliability]:
    told = list(verdicts)
    ends = itertools.pairwise((*CLASSES, float("inf")))
    classes = [
        (least, most, [ok for bits, ok in told if least <= bits < most]) for least, most in ends
    ]
    return [Reliability(least, most, len(ok), sum(ok)) for least, most, ok in classes]


def table(found: Iterable[Reliability]) -> str:
    lines = ["| margin, bits | verdicts | right |", "|---|---|---|"]
    for one in found:
        end = "and more" if one.most == float("inf") else f"to {one.most:g}"
        share = f"{100 * one.right / one.number:.1f} %" if one.number else ""
        lines.append(f"| {one.least:g} {end} | {one.number} | {share} |")
    return "\n".join(lines)


def main(*arguments: str) -> None:
    found: list[Scored] = []
    for size, first, last in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
        found += all_scored(size, range(int(first), int(last)))
    sys.stdout.write(f"{table(reliability(named(found)))}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
