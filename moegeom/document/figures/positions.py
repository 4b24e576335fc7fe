"""Which expert is used where in a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moegeom.core.text import figure_text, number_of
from moegeom.document.chart import Axis, Chart, Heat, Panel
from moegeom.document.drawing import Drawing, FigureResults

#: Experts up to which each has a line: of more, hardly any is chosen at all.
_MOST = 48

_COLUMNS = ("document_number", "position", "expert", "weight")


def _draw(source: FigureResults) -> Iterator[Chart]:
    if not source.has("positions", "weight"):
        return
    by_router = source.by_router("positions", _COLUMNS)
    routers = list(by_router)
    if not routers:
        return
    router = routers[len(routers) // 2]
    rows = by_router[router]
    experts = source.results.run["routers"][source.routers.index(router)]["num_experts"]
    highest = max((w for w in rows["weight"] if w is not None), default=0.0)
    busiest = most_used(rows["expert"], rows["weight"], experts)
    panels = []
    for document in sorted({*rows["document_number"]}):
        own = [i for i, number in enumerate(rows["document_number"]) if number == document]
        places = sorted({rows["position"][i] for i in own})
        column = {position: number for number, position in enumerate(places)}
        line = {expert: number for number, expert in enumerate(busiest)}
        values: list[list[float | None]] = [[None] * len(places) for _ in busiest]
        for i in own:
            if (expert := rows["expert"][i]) in line:
                values[line[expert]][column[rows["position"][i]]] = rows["weight"][i]
        heat = Heat(values, "routing weight", 0.0, highest or 1.0)
        expert_axis = Axis("expert", names=[str(e) for e in busiest])
        positions = Axis("position", names=[str(p) for p in places])
        title = f"layer {source.names[router]}, document {document + 1}"
        panels.append(Panel(title, positions, expert_axis, [heat]))
    tokens = len({*zip(rows["document_number"], rows["position"], strict=True)})
    yield Chart(
        "positions",
        "Experts along a document",
        "The routing weight of each expert at the first positions of some documents, white where "
        "it is not chosen: runs are experts that stay, columns at the start are sinks."
        + (
            f" Of {experts} experts, the {_MOST} with the largest weight."
            if experts > _MOST
            else ""
        ),
        "Other documents, layers and experts: positions.parquet holds them all.",
        f"Layer {source.names[router]}, {number_of(tokens, 'token')} of {len(panels)} documents; "
        f"the largest weight is {figure_text(highest)}.",
        panels,
        [
            ("router", [router for _ in rows["expert"]]),
            *((name, rows[name]) for name in _COLUMNS),
        ],
    )


def most_used(expert: Sequence[int], weight: Sequence[float | None], experts: int) -> Sequence[int]:
    """All experts, or those with the largest sum of weights; by their numbers."""
    if experts <= _MOST:
        return range(experts)
    total = [0.0] * experts
    for number, of_it in zip(expert, weight, strict=True):
        if 0 <= number < experts:
            total[number] += of_it or 0.0
    return sorted(sorted(range(experts), key=lambda number: -total[number])[:_MOST])


DRAWING = Drawing("positions", 90, "which experts are used along a document", _draw)
