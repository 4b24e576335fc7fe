"""Load of experts: of the least even layers, everywhere, by domain and along documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moegeom.core.row_keys import RANDOM
from moegeom.core.text import figure_text, number_of
from moegeom.document.chart import Axis, Bars, Chart, Guide, Heat, Panel, Polyline, padded
from moegeom.document.drawing import Drawing, FigureResults, interval


def units_of(source: FigureResults) -> str:
    """What intervals are over: documents, or runs of tokens where those are not told apart."""
    tokens = source.results.run["tokens"]
    has_documents = tokens.get("has_documents", True) and tokens["num_documents"] != 1
    return "documents" if has_documents else "runs of tokens"


def _draw_load(source: FigureResults) -> Iterator[Chart]:
    if not source.has("experts", "load"):
        return
    columns = ["expert", "load", "load_se"]
    rows = source.by_router("experts", columns)
    routers = [router for router in source.worst("max_vio_global") if router in rows]
    if not routers:
        return
    random = source.by_router("experts", ["load"], variant=RANDOM)
    panels, more, sentences = [], [], []
    every = [router for router in source.routers if router in rows]
    for router in every:
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
        panel = Panel(
            f"layer {source.names[router]}",
            Axis("expert, busiest first", names=experts),
            Axis("load over the mean"),
            marks,
            is_wide=len(routers) == 1,
        )
        if router not in routers:
            more.append(panel)
            continue
        panels.append(panel)
        sentences.append(
            f"layer {source.names[router]}: expert {experts[0]} gets {figure_text(load[0] or 0.0)} "
            f"times the mean, expert {experts[-1]} {figure_text(load[-1] or 0.0)} times"
        )
    yield Chart(
        "load",
        "Load of the experts, least even layers",
        "Tokens of each expert over the mean of its layer, busiest first, with the 95 % interval "
        f"over {units_of(source)}. The grey line is the random router: rows of the same lengths "
        "without directions of their own, on the same tokens.",
        "Whether the model answers worse for it. Loads are of these tokens; others differ.",
        f"{'; '.join(sentences)}.",
        panels,
        [
            ("router", [router for router in every for _ in rows[router]["load"]]),
            *((name, [v for router in every for v in rows[router][name]]) for name in columns),
        ],
        more,
    )


LOAD = Drawing(
    "load", 30, "load of the experts of the least even layers, busiest first", _draw_load
)


def _draw_load_map(source: FigureResults) -> Iterator[Chart]:
    if not source.has("experts", "load"):
        return
    rows = source.by_router("experts", ["expert", "load"])
    rows = {router: row for router, row in rows.items() if any(v for v in row["load"])}
    if not rows:
        return
    widest = max(len(row["load"]) for row in rows.values())
    values = padded([row["load"] for row in rows.values()], widest)
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


LOAD_MAP = Drawing(
    "load_map", 20, "load of every expert in every layer, over the mean", _draw_load_map
)


#: Layers that are drawn: those whose choices tell most of the domain.
_MOST_DOMAINS = 4


def _draw_domains(source: FigureResults) -> Iterator[Chart]:
    domains = source.results.columns("domains", ["population"])["population"]
    if len(domains) < 2 or not source.has("experts", "load"):
        return
    whole = source.by_router("experts", ["expert", "load"])
    parts = {name: source.by_router("experts", ["load"], population=name) for name in domains}
    candidates = (
        source.worst("domain_information_share", _MOST_DOMAINS) or source.routers[:_MOST_DOMAINS]
    )
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


DOMAINS = Drawing(
    "domains", 80, "load of each expert in each domain, over that in all", _draw_domains
)


#: Experts up to which each has a line: of more, hardly any is chosen at all.
_MOST_POSITIONS = 48

_COLUMNS = ("document_number", "position", "expert", "weight")


def _draw_positions(source: FigureResults) -> Iterator[Chart]:
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
            f" Of {experts} experts, the {_MOST_POSITIONS} with the largest weight."
            if experts > _MOST_POSITIONS
            else ""
        ),
        "Other documents, layers and experts: positions.parquet holds them all.",
        f"Layer {source.names[router]}, {number_of(tokens, 'token')} of {len(panels)} documents; "
        f"the largest weight is {figure_text(highest)}.",
        panels,
        [("router", [router for _ in rows["expert"]]), *((name, rows[name]) for name in _COLUMNS)],
    )


def most_used(expert: Sequence[int], weight: Sequence[float | None], experts: int) -> Sequence[int]:
    """All experts, or those with the largest sum of weights; by their numbers."""
    if experts <= _MOST_POSITIONS:
        return range(experts)
    total = [0.0] * experts
    for number, of_it in zip(expert, weight, strict=True):
        if 0 <= number < experts:
            total[number] += of_it or 0.0
    return sorted(sorted(range(experts), key=lambda number: -total[number])[:_MOST_POSITIONS])


POSITIONS = Drawing("positions", 90, "which experts are used along a document", _draw_positions)
