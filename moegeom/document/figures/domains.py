"""Which experts the tokens of a domain prefer."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.core.text import figure_text
from moegeom.document.chart import Axis, Chart, Heat, Panel
from moegeom.document.drawing import Drawing, FigureResults

#: Layers that are drawn: those whose choices tell most of the domain.
_MOST = 4


def _draw(source: FigureResults) -> Iterator[Chart]:
    domains = source.results.columns("domains", ["population"])["population"]
    if len(domains) < 2 or not source.has("experts", "load"):
        return
    whole = source.by_router("experts", ["expert", "load"])
    parts = {name: source.by_router("experts", ["load"], population=name) for name in domains}
    candidates = source.worst("domain_information_share", _MOST) or source.routers[:_MOST]
    routers = [router for router in candidates if router in whole]
    panels, sentences = [], []
    for router in routers:
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
        preferences = [
            (value, names[i], expert)
            for i, row in enumerate(values)
            for expert, value in zip(whole[router]["expert"], row, strict=True)
            if value is not None
        ]
        if not preferences:
            continue
        value, name, expert = max(preferences)
        heat = Heat(values, "load in the domain over load in all", 0.25, 4.0, 1.0, "log2")
        experts = Axis("expert", names=[str(e) for e in whole[router]["expert"]])
        title = f"layer {source.names[router]}"
        panels.append(Panel(title, experts, Axis("", names=names), [heat]))
        often = f"{figure_text(value)} times as often as all do"
        sentences.append(f"{title}: tokens of {name} choose expert {expert} {often}")
    if not panels:
        return
    rows = [(n, r) for n in domains for r in parts[n]]
    yield Chart(
        "domains",
        "Experts and domains",
        "How often tokens of each domain choose an expert, over how often all tokens do: red more, "
        "blue less. Layers whose choices tell most about the domain.",
        "What an expert knows. Domains are those that the recording names.",
        "; ".join(sentences) + ".",
        panels,
        [
            ("population", [n for n, r in rows for _ in parts[n][r]["load"]]),
            ("router", [r for n, r in rows for _ in parts[n][r]["load"]]),
            ("expert", [e for n, r in rows for e in range(len(parts[n][r]["load"]))]),
            ("load", [v for n, r in rows for v in parts[n][r]["load"]]),
        ],
    )


DRAWING = Drawing("domains", 80, "load of each expert in each domain, over that in all", _draw)
