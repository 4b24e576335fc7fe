"""Figures of a series: its curves step by step, and how the load spreads over the experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from moegeom.core.series import SERIES_COLUMNS, Curve, Series
from moegeom.core.text import figure_text, number_of, percent
from moegeom.document.chart import Areas, Axis, Chart, Guide, Mark, Numbers, Panel, Polyline
from moegeom.document.colours import GROUPS
from moegeom.document.drawing import interval
from moegeom.document.place import place
from moegeom.kernels.batch import NUM_BLOCKS

#: Figures that get a panel, as far as they are known.
_PANELS = (
    "max_vio_global",
    "routing_entropy_normalised",
    "overlap_with_last",
    "expert_set_churn",
    "row_drift_median",
    "margin_p50",
)

#: Routers up to this many get a colour each; of more the median and both ends are drawn.
_NAMED = 6

#: Layers whose experts are drawn.
_LAYERS = 4


def series_figures(series: Series) -> list[Chart]:
    """The charts of a series; none for a single step."""
    if len(series.steps) < 2:
        return []
    return [*_curves(series), *_usage(series)]


def _curves(series: Series) -> Iterator[Chart]:
    words = {column.name: column.words for column in SERIES_COLUMNS}
    measured = [name for name in words if series.of_column(name)]
    names = [name for name in _PANELS if name in measured] or measured[:6]
    if not names:
        return
    steps = [step.step for step in series.steps]
    panels = [
        Panel(
            words[name],
            Axis("training step"),
            Axis(words[name]),
            _lines(series, series.of_column(name), steps),
            is_wide=False,
        )
        for name in names
    ]
    every = [curve for name in measured for curve in series.of_column(name)]
    rows = [(curve, at) for curve in every for at in range(len(steps))]
    yield Chart(
        "curves",
        "Step by step",
        "Each figure at each checkpoint, with its 95 % interval over documents. Of more than "
        f"{_NAMED} routers the median, the highest and the lowest at the last step.",
        "What comes between two checkpoints, and whether the model got better.",
        "; ".join(_sentence(words[name], series.of_column(name)) for name in names) + ".",
        panels,
        [
            ("router", [curve.router for curve, _ in rows]),
            ("figure", [curve.column for curve, _ in rows]),
            ("step", [steps[at] for _, at in rows]),
            ("value", [curve.values[at] for curve, at in rows]),
            ("standard_error", [curve.errors[at] for curve, at in rows]),
        ],
    )


def _sentence(words: str, curves: Sequence[Curve]) -> str:
    def middle(at: int) -> str:
        numbers = [value for curve in curves if (value := curve.values[at]) is not None]
        return figure_text(median(numbers)) if numbers else "unknown"

    return f"{words}: median {middle(0)} at the first step, {middle(-1)} at the last"


def _lines(series: Series, curves: Sequence[Curve], steps: Sequence[float]) -> list[Mark]:
    names = series.routers()

    def line(curve: Curve, role: str, text: str) -> Polyline:
        low, high = interval(curve.values, curve.errors, NUM_BLOCKS)
        return Polyline(text, role, steps, curve.values, low, high)

    if len(curves) <= _NAMED:
        return [
            line(curve, f"g{number}", f"layer {place(curve.router, names)}")
            for number, curve in enumerate(curves)
        ]
    ordered = sorted(curves, key=lambda curve: curve.values[-1] or 0.0)
    ends = (("other", "highest", ordered[-1]), ("tokens", "lowest", ordered[0]))
    marks: list[Mark] = [
        line(curve, role, f"{text}, layer {place(curve.router, names)}")
        for role, text, curve in ends
    ]
    columns = [[v for c in curves if (v := c.values[at]) is not None] for at in range(len(steps))]
    middle: Numbers = [median(column) if column else None for column in columns]
    return [*marks, Polyline("median", "dim", steps, middle)]


def _usage(series: Series) -> Iterator[Chart]:
    by_router: dict[str, dict[int, dict[float, float]]] = {}
    for router, step, expert, load in series.usage:
        by_router.setdefault(router, {}).setdefault(expert, {})[step] = load
    if not by_router:
        return
    steps = [step.step for step in series.steps]
    worst = {c.router: c.values[-1] or 0.0 for c in series.of_column("max_vio_global")}
    chosen = sorted(by_router, key=lambda router: -worst.get(router, 0.0))[:_LAYERS]
    routers = [router for router in by_router if router in chosen]
    panels, texts = [], []
    for router in routers:
        loads, name = by_router[router], place(router, series.routers())
        experts = sorted(loads, key=lambda e: -loads[e].get(steps[-1], 0.0))
        totals = {s: sum(loads[e].get(s, 0.0) for e in experts) for s in steps}
        shares = [
            [loads[e].get(s, 0.0) / totals[s] if totals[s] else None for s in steps]
            for e in experts
        ]
        names = [f"expert {expert}" for expert in experts]
        marks: list[Mark] = [Areas(steps, shares, names)]
        if len(experts) <= 4 * len(GROUPS):
            marks.append(Guide("fair share", "limit", 1.0 / len(experts)))
        title = f"layer {name}"
        panels.append(Panel(title, Axis("training step"), Axis("share of choices"), marks, False))
        ends = [percent(shares[0][at] or 0.0, ".3g") for at in (0, -1)]
        texts.append(f"layer {name}: expert {experts[0]} {ends[0]}, then {ends[1]}")
    yield Chart(
        "usage",
        "Who gets the tokens, step by step",
        "The share of all choices that each expert gets, stacked, the busiest of the last step at "
        "the bottom; the dashed line is a fair share.",
        "Which tokens they are. Each step has its own recording.",
        f"{number_of(len(by_router), 'layer')}, first and last step: {'; '.join(texts)}.",
        panels,
        [
            ("router", [row[0] for row in series.usage]),
            ("step", [row[1] for row in series.usage]),
            ("expert", [row[2] for row in series.usage]),
            ("load", [row[3] for row in series.usage]),
        ],
    )
