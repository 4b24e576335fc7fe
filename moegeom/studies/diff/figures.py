"""Figures of a difference: every figure before and after, router by router."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.core.text import figure_text
from moegeom.document.chart import Axis, Bars, Chart, Panel
from moegeom.document.place import place
from moegeom.studies.diff.record import Difference, FigureChange

#: Figures that get a panel, the most surely changed first.
_MOST = 6


def difference_figures(report: Difference) -> Iterator[Chart]:
    """Nothing where no figure was compared."""
    if report.figures is None or not report.figures.tests:
        return
    tests: dict[str, list[FigureChange]] = {}
    for test in report.figures.tests:
        tests.setdefault(test.column, []).append(test)
    groups = sorted(tests.values(), key=lambda of: min(test.p_value for test in of))[:_MOST]
    routers = [router.router for router in report.routers]
    panels = [
        Panel(
            of[0].text,
            Axis("layer", names=[place(test.router, routers) for test in of]),
            Axis(of[0].text),
            [
                Bars("A", "tokens", [test.before for test in of]),
                Bars("B", "other", [test.after for test in of]),
            ],
            is_wide=False,
        )
        for of in groups
    ]
    sure = report.figures.significant
    caption = (
        f"{sure[0].text} in layer {place(sure[0].router, routers)} went from "
        f"{figure_text(sure[0].before)} to {figure_text(sure[0].after)} (standard error "
        f"{figure_text(sure[0].error)})"
        if sure
        else "no change is more than chance"
    )
    every = report.figures.tests
    yield Chart(
        "before_after",
        "Before and after",
        "Figures of A and of B in each layer, those that changed most surely first.",
        "Figures without a standard error, which cannot be compared, and what a change means for "
        "answers.",
        f"{len(sure)} of {len(every)} comparisons differ by more than chance; {caption}.",
        panels,
        [
            ("router", [test.router for test in every]),
            ("figure", [test.column for test in every]),
            ("before", [test.before for test in every]),
            ("after", [test.after for test in every]),
            ("standard_error", [test.error for test in every]),
            ("p_value", [test.p_value for test in every]),
        ],
    )
