"""Load of the experts of the least even layers, with the range over documents."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.core.row_keys import RANDOM
from moegeom.core.text import figure_text
from moegeom.document.chart import Axis, Bars, Chart, Guide, Panel, Polyline
from moegeom.document.drawing import Drawing, FigureResults, interval


def _draw(source: FigureResults) -> Iterator[Chart]:
    if not source.has("experts", "load"):
        return
    columns = ["expert", "load", "load_se"]
    rows = source.by_router("experts", columns)
    routers = [router for router in source.worst("max_vio_global") if router in rows]
    if not routers:
        return
    random = source.by_router("experts", ["load"], variant=RANDOM)
    panels, sentences = [], []
    for router in routers:
        row = rows[router]
        order = sorted(range(len(row["load"])), key=lambda i: -(row["load"][i] or 0.0))
        load = [row["load"][i] for i in order]
        errors = [row["load_se"][i] for i in order]
        low, high = interval(load, errors, source.blocks(router))
        experts = [str(row["expert"][i]) for i in order]
        marks = [
            Bars("tokens, 95 % interval", "tokens", load, low, high),
            Guide("even load", "limit", 1.0),
        ]
        if router in random:
            random_load = sorted(random[router]["load"], reverse=True)
            marks.append(Polyline("random router", "random", list(range(len(load))), random_load))
        panels.append(
            Panel(
                f"layer {source.names[router]}",
                Axis("expert, busiest first", names=experts),
                Axis("load over the mean"),
                marks,
                is_wide=len(routers) == 1,
            )
        )
        sentences.append(
            f"layer {source.names[router]}: expert {experts[0]} gets {figure_text(load[0] or 0.0)} "
            f"times the mean, expert {experts[-1]} {figure_text(load[-1] or 0.0)} times"
        )
    every = [r for r in source.routers if r in rows]
    yield Chart(
        "load",
        "Load of the experts, least even layers",
        "Tokens of each expert over the mean of its layer, busiest first, with the 95 % interval "
        "over documents. The grey line is the random router: rows of the same lengths without "
        "directions of their own, on the same tokens.",
        "Whether the model answers worse for it. Loads are of these documents; others differ.",
        f"{'; '.join(sentences)}.",
        panels,
        [
            ("router", [router for router in every for _ in rows[router]["load"]]),
            *((name, [v for router in every for v in rows[router][name]]) for name in columns),
        ],
    )


DRAWING = Drawing("load", 30, "load of the experts of the least even layers, busiest first", _draw)
