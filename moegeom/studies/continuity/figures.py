"""The output over a boundary: along the line, how far it spreads, and how that grows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from moegeom.core.text import figure_text, percent
from moegeom.document.chart import Axis, Chart, Guide, Panel, Polyline
from moegeom.document.place import place
from moegeom.studies.continuity.record import Along, Continuity, RouterContinuity

#: Colours of the gates.
_ROLES = {"hard": "tokens", "smooth": "g1"}


def continuity_figures(found: Continuity) -> Iterator[Chart]:
    """One for each router, the highest jump first."""
    names = [one.router for one in found.routers]
    for one in sorted(found.routers, key=lambda each: -each.crossing.relative):
        yield _crossing(one, place(one.router, names))


def _crossing(one: RouterContinuity, name: str) -> Chart:
    crossing = one.crossing
    gates = [along for along in (crossing.hard, crossing.smooth) if along is not None]
    unit = crossing.rms * math.sqrt(one.hidden_size)
    offset = [float(value / unit) for value in crossing.offset]
    radius = [float(value / unit) for value in crossing.radius]
    out, into = crossing.pair

    def lines(of: str, at: Sequence[float]) -> list[Polyline]:
        return [Polyline(along.gate, _ROLES[along.gate], at, _values(along, of)) for along in gates]

    panels = [
        Panel(
            "The output along the line",
            Axis("from the boundary, in rms lengths"),
            Axis(f"output {crossing.coordinate}"),
            lines("line", offset),
        ),
        Panel(
            "How far it spreads",
            Axis("within r, in rms lengths of the input", "log10"),
            Axis("spread G", "log10"),
            [*lines("spread", radius), Guide("height of the jump", "limit", crossing.jump)],
        ),
        Panel(
            "How that grows",
            Axis("within r, in rms lengths of the input", "log10"),
            Axis("slope d ln G / d ln r"),
            [*lines("slope", radius), Guide("a derivative", "dim", 1.0)],
        ),
    ]
    smoothed = (
        ""
        if crossing.smooth is None
        else f"; smoothed, {figure_text(float(crossing.smooth.spread[0]))} with slope "
        f"{crossing.smooth.slope_near:.2f}"
    )
    return Chart(
        f"crossing-{one.router.replace('/', '-')}",
        f"Layer {name}: the output where expert {into} takes over from expert {out}",
        f"A line through the nearest boundary point of token {crossing.token}, at right angles to "
        "the boundary. First the coordinate of the output that jumps most, by the model's own gate "
        "and by the smoothed one, whose experts are the same; then the largest distance of two "
        "outputs within r of the boundary, all coordinates together; last its slope: 0 where the "
        "output jumps, 1 where it has a derivative.",
        "Other lines, shared experts, and what later layers make of it.",
        f"Within {radius[0]:.0e} rms lengths the output spreads by "
        f"{figure_text(float(crossing.hard.spread[0]))} with slope {crossing.hard.slope_near:.2f}, "
        f"{percent(crossing.relative)} of its length{smoothed}.",
        panels,
        [
            ("radius", radius),
            *(
                (f"{along.gate}_{column}", _values(along, column))
                for along in gates
                for column in ("spread", "slope", "spread_coordinate", "slope_coordinate")
            ),
        ],
    )


def _values(along: Along, name: str) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in getattr(along, name).tolist()]
