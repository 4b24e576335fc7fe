"""Tokens and experts in the plane of the two widest directions of the router inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moegeom.core.text import figure_text, percent
from moegeom.document.chart import Axis, Chart, Panel, Points
from moegeom.document.colours import GROUPS
from moegeom.document.drawing import Drawing, Drawn

#: Layers that are drawn: the first, the middle and the last.
_LAYERS = 3

_COLUMNS = ("expert", "is_expert", "domain_number", "x", "y", "margin")


def _draw(drawn: Drawn) -> Iterator[Chart]:
    if not drawn.has("sample", "x"):
        return
    held = drawn.by_router("sample", _COLUMNS)
    routers = list(held)
    shown = sorted({routers[round(i * (len(routers) - 1) / (_LAYERS - 1))] for i in range(_LAYERS)})
    shown = [router for router in routers if router in shown]
    domains = list((drawn.results.run["tokens"] or {}).get("domains") or ())
    panels = []
    for router in shown:
        rows = held[router]
        token = [i for i, is_expert in enumerate(rows["is_expert"]) if not is_expert]
        busiest = sorted(
            {rows["expert"][i] for i in token},
            key=lambda e: -sum(rows["expert"][i] == e for i in token),
        )[: len(GROUPS) - 1]
        groups = [
            busiest.index(e) if (e := rows["expert"][i]) in busiest else len(busiest) for i in token
        ]
        names = [*(f"expert {e}" for e in busiest), "others"]
        layer = f"layer {drawn.names[router]}"
        panels.append(_panel(f"{layer}, by first choice", rows, token, groups, names))
        if len(domains) > 1:
            known = [min(max(rows["domain_number"][i], 0), len(domains) - 1) for i in token]
            panels.append(_panel(f"{layer}, by domain", rows, token, known, domains))
    same, chance = drawn.layers("near_same_choice"), drawn.layers("near_same_choice_chance")
    wide, near = drawn.layers("plane_share"), drawn.layers("choice_silhouette")
    said = [
        f"layer {drawn.names[r]}: {percent(same[r], '.3g')} of the 10 nearest tokens, in all "
        f"dimensions, choose the same first expert ({percent(chance[r], '.3g')} by chance)"
        + (f", silhouette {figure_text(near[r])}" if r in near else "")
        + (f"; the plane holds {percent(wide[r], '.3g')} of the variance" if r in wide else "")
        for r in shown
        if r in same and r in chance
    ]
    yield Chart(
        "plane",
        "Tokens in the plane of their widest directions",
        "A sample of tokens by the two principal components of the router inputs, coloured by "
        "their first choice, and by domain if there are any. The sentence below gives what does "
        "not depend on a plane: whether near tokens choose alike.",
        "Clusters and gaps that look like any: all but two of the directions are left out.",
        f"{'; '.join(said)}." if said else "Too few tokens to say whether near ones choose alike.",
        panels,
        [
            ("router", [router for router in shown for _ in held[router]["x"]]),
            *((name, [v for router in shown for v in held[router][name]]) for name in _COLUMNS),
        ],
    )


def _panel(
    title: str,
    rows: Mapping[str, Sequence[Any]],
    token: Sequence[int],
    groups: Sequence[int],
    names: Sequence[str],
) -> Panel:
    x, y = ([rows[name][i] for i in token] for name in ("x", "y"))
    return Panel(
        title,
        Axis("widest direction, in units of the input"),
        Axis("second direction"),
        [Points(x, y, groups, names)],
        is_wide=False,
    )


DRAWING = Drawing("plane", 70, "tokens in the plane of their widest directions", _draw)
