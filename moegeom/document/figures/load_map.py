"""Load of every expert in every layer, over the mean."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.core.text import figure_text, number_of
from moegeom.document.chart import Axis, Chart, Heat, Panel
from moegeom.document.drawing import Drawing, FigureResults


def _draw(source: FigureResults) -> Iterator[Chart]:
    if not source.has("experts", "load"):
        return
    rows = source.by_router("experts", ["expert", "load"])
    rows = {router: row for router, row in rows.items() if any(v for v in row["load"])}
    if not rows:
        return
    widest = max(len(row["load"]) for row in rows.values())
    values = [[*row["load"], *[None] * (widest - len(row["load"]))] for row in rows.values()]
    loads = [
        (v, r, e) for r, row in rows.items() for e, v in enumerate(row["load"]) if v is not None
    ]
    (high, where, who), dead = max(loads), sum(v == 0.0 for v, _, _ in loads)
    heat = Heat(values, "load over the mean of the layer", 0.125, 8.0, 1.0, "log2")
    yield Chart(
        "load_map",
        "Load of every expert",
        "How many tokens each expert gets over the mean of its layer: blue less, red more, white "
        "as many as an even load gives it.",
        "Why. The range of chance and the random router stand in the figure of the worst layers.",
        f"{number_of(len(rows), 'layer')}; the busiest of up to {number_of(widest, 'expert')} is "
        f"expert {who} in layer {source.names[where]} with {figure_text(high)} times the mean; "
        f"{dead} get no token.",
        [
            Panel(
                "",
                Axis("expert", names=[str(e) for e in range(widest)]),
                Axis(
                    "layer",
                    names=[source.names[r] for r in rows],
                    links=[source.links[r] for r in rows],
                ),
                [heat],
            )
        ],
        [
            ("router", [router for router, row in rows.items() for _ in row["load"]]),
            ("expert", [expert for row in rows.values() for expert in row["expert"]]),
            ("load", [load for row in rows.values() for load in row["load"]]),
        ],
    )


DRAWING = Drawing("load_map", 20, "load of every expert in every layer, over the mean", _draw)
