"""The figure of what-ifs: how even the loads would be, and how much weight that moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moegeom.core.text import figure_text, percent
from moegeom.document.chart import Axis, Bars, Chart, Guide, Panel, Points, Polyline
from moegeom.studies.whatif.record import Tried, WhatIfReport

#: What-ifs that have a bar each; of more a sweep has the front alone.
_MOST_BARS = 48


def what_if_figures(report: WhatIfReport) -> Iterator[Chart]:
    """Nothing where no what-if has both figures."""
    points = [(one, *_at(one)) for one in report.whole]
    pairs = [
        (one, moved, vio) for one, moved, vio in points if moved is not None and vio is not None
    ]
    before = report.stored.mean("max_vio_global")
    if not pairs or before is None:
        return
    front = [one for one in report.front if one is not report.stored]
    ends = [(0.0, before)] if report.stored in report.front else []
    ends += [(m, v) for one, m, v in pairs if one in front]
    ends.sort()
    if len(pairs) <= _MOST_BARS:
        yield _bars(pairs, before)
    local = [int(not one.is_causal) for one, *_ in pairs]
    marks = [
        Points(
            [0.0, *(m for _, m, _ in pairs)],
            [before, *(v for *_, v in pairs)],
            [2, *local],
            ["follows from the text so far", "later tokens matter", "as stored"],
        ),
        Polyline("no other is better in both", "limit", [m for m, _ in ends], [v for _, v in ends]),
    ]
    best = min(pairs, key=lambda point: point[2])
    yield Chart(
        "front",
        "How even, and at what price",
        "MaxVio, the largest load over the mean less 1, against the share of routing weight that "
        "lies on other experts than now, both mean over layers; one point for each what-if.",
        "What a model would say that was trained with another router, or what it loses.",
        f"Least MaxVio: {best[0].name}, {figure_text(best[2])} (now {figure_text(before)}), with "
        f"{figure_text(100.0 * best[1])} % of the weight moved.",
        [Panel("", Axis("share of the routing weight moved"), Axis("MaxVio"), marks)],
        _columns(pairs),
    )


def _bars(points: Sequence[tuple[Tried, float, float]], before: float) -> Chart:
    names = [one.name for one, *_ in points]
    most = max(points, key=lambda point: point[1])
    best = min(points, key=lambda point: point[2])
    y = Axis("", names=names)
    return Chart(
        "choices",
        "How uneven, and how much weight moves",
        "For each what-if MaxVio, the largest load over the mean less 1 (the line: now), and the "
        "share of routing weight that lies on other experts than now; both mean over layers.",
        "What a model would say that was trained with another router, or what it loses.",
        f"MaxVio is {figure_text(before)} now, least with {best[0].name}: {figure_text(best[2])}. "
        f"Most weight moves with {most[0].name}: {percent(most[1])}.",
        [
            Panel(
                "MaxVio",
                Axis("MaxVio"),
                y,
                [Bars("MaxVio", "tokens", [v for *_, v in points]), Guide("now", "limit", before)],
            ),
            Panel(
                "weight moved",
                Axis("share of the routing weight"),
                y,
                [Bars("weight moved", "other", [m for _, m, _ in points])],
            ),
        ],
        _columns(points),
    )


def _columns(
    points: Sequence[tuple[Tried, float, float]],
) -> list[tuple[str, Sequence[str | float | bool]]]:
    return [
        ("what_if", [one.name for one, *_ in points]),
        ("experts_mean", [one.experts_mean for one, *_ in points]),
        ("weight_moved_mean", [m for _, m, _ in points]),
        ("max_vio_global", [v for *_, v in points]),
        ("is_causal", [one.is_causal for one, *_ in points]),
    ]


def _at(one: Tried) -> tuple[float | None, float | None]:
    return one.mean("weight_moved_mean"), one.mean("max_vio_global")
