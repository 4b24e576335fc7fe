"""The figure of a check: what was found in which layer, and what was not."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.core.finding import Outcome
from moegeom.core.text import number_of
from moegeom.document.chart import Axis, Chart, Heat, Panel
from moegeom.document.place import place
from moegeom.document.verdict_blocks import anchor
from moegeom.studies.check.record import Gate

#: How red each ending is; blue is what was asked for and not judged.
_SHADES = {
    "not judged": -1.0,
    "passed": 0.0,
    "accepted": 0.2,
    "note": 0.2,
    "warning": 0.6,
    "error": 1.0,
}

#: Ends of checks that looked at the layers.
_JUDGED = ("passed", "failed", "inconclusive", "ignored")


def gate_figures(found: Gate) -> Iterator[Chart]:
    """Nothing where no check looked at a router."""
    routers = [router["name"] for router in found.run["routers"]]
    outcomes = [outcome for outcome in found.verdict.outcomes if outcome.state in _JUDGED]
    if not routers or not outcomes:
        return
    ends = [[_end(outcome, router) for router in routers] for outcome in outcomes]
    names = [place(router, routers) for router in routers]
    held = [
        f"{outcome.code} ({outcome.title}): "
        + ", ".join(name for name, end in zip(names, row, strict=True) if _SHADES[end] > 0.2)
        for outcome, row in zip(outcomes, ends, strict=True)
    ]
    told = [text for text in held if not text.endswith(": ")]
    places = [(outcome, router) for outcome in outcomes for router in routers]
    said = number_of(len(outcomes), "check") + " judged"
    yield Chart(
        "checks",
        "What was found in which layer",
        "Each check that was judged, in each layer: pale where it passed, red where it found "
        "something, darker for an error than for a warning; blue where it could not be judged. The "
        "code of a check leads to what holds when it passes.",
        "Checks that need tokens or a baseline, or do not apply: they are in the list of all "
        "checks. How far a layer is from a limit.",
        f"{said}, in {number_of(len(routers), 'layer')}; "
        + (f"found by layer: {'; '.join(told)}." if told else "nothing was found."),
        [
            Panel(
                "",
                Axis("layer", names=names),
                Axis(
                    "",
                    names=[f"{o.code} {o.statement or o.title}" for o in outcomes],
                    links=[f"#{anchor(outcome)}" for outcome in outcomes],
                ),
                [
                    Heat(
                        [[_SHADES[end] for end in row] for row in ends],
                        "pale: passed",
                        -1.0,
                        1.0,
                        0.0,
                        cells=[["" if end == "passed" else end for end in row] for row in ends],
                        ends=("not judged", "passed", "error"),
                    )
                ],
            )
        ],
        [
            ("check", [outcome.code for outcome, _ in places]),
            ("router", [router for _, router in places]),
            ("end", [end for row in ends for end in row]),
        ],
    )


def _end(outcome: Outcome, router: str) -> str:
    """How a check ended in one layer; a finding that names no layer is about all of them."""
    if any(router in (finding.routers or (router,)) for finding in outcome.findings):
        return outcome.severity
    if any(router in (finding.routers or (router,)) for finding, _ in outcome.accepted):
        return "accepted"
    return "not judged" if outcome.state == "inconclusive" or outcome.num_open else "passed"
