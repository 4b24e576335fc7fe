"""Which experts the tokens of a domain prefer."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.core.text import figure_text
from moegeom.document.chart import Axis, Chart, Heat, Panel
from moegeom.document.drawing import Drawing, FigureResults

#: Layers that are drawn: those whose choices tell most of the domain.
_MOST = 4


def _draw(drawn: FigureResults) -> Iterator[Chart]:
    domains = drawn.results.columns("domains", ["population"])["population"]
    if len(domains) < 2 or not drawn.has("experts", "load"):
        return
    whole = drawn.by_router("experts", ["expert", "load"])
    parts = {name: drawn.by_router("experts", ["load"], population=name) for name in domains}
    told = drawn.worst("domain_information_share", _MOST) or drawn.routers[:_MOST]
    shown = [router for router in told if router in whole]
    panels, said = [], []
    for router in shown:
        load = whole[router]["load"]
        values = [
            [
                None if not all_of_them or own is None else own / all_of_them
                for own, all_of_them in zip(parts[name][router]["load"], load, strict=True)
            ]
            for name in domains
            if router in parts[name]
        ]
        names = [name.removeprefix("domain=") for name in domains if router in parts[name]]
        known = [
            (value, names[i], expert)
            for i, row in enumerate(values)
            for expert, value in zip(whole[router]["expert"], row, strict=True)
            if value is not None
        ]
        if not known:
            continue
        value, name, expert = max(known)
        heat = Heat(values, "load in the domain over load in all", 0.25, 4.0, 1.0, "log2")
        experts = Axis("expert", names=[str(e) for e in whole[router]["expert"]])
        panels.append(Panel(f"layer {drawn.names[router]}", experts, Axis("", names=names), [heat]))
        said.append(
            f"layer {drawn.names[router]}: tokens of {name} choose expert {expert} "
            f"{figure_text(value)} times as often as all do"
        )
    if not panels:
        return
    rows = [(n, r) for n in domains for r in parts[n]]
    yield Chart(
        "domains",
        "Experts and domains",
        "How often tokens of each domain choose an expert, over how often all tokens do: red more, "
        "blue less. Layers whose choices tell most about the domain.",
        "What an expert knows. Domains are those that the recording names.",
        "; ".join(said) + ".",
        panels,
        [
            ("population", [n for n, r in rows for _ in parts[n][r]["load"]]),
            ("router", [r for n, r in rows for _ in parts[n][r]["load"]]),
            ("expert", [e for n, r in rows for e in range(len(parts[n][r]["load"]))]),
            ("load", [v for n, r in rows for v in parts[n][r]["load"]]),
        ],
    )


DRAWING = Drawing("domains", 80, "load of each expert in each domain, over that in all", _draw)
