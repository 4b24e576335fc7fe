"""Tokens and experts in the plane of the two widest directions of the router inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegeom.core.text import figure_text, percent
from moegeom.document.chart import Axis, Chart, Numbers, Panel, Points
from moegeom.document.colours import GROUPS
from moegeom.document.drawing import Drawing, FigureResults

#: Layers that are drawn: the first, the middle and the last.
_LAYERS = 3

_COLUMNS = ("expert", "is_expert", "domain_number", "x", "y", "margin")


@dataclass(frozen=True)
class TokensOfLayer:
    """The sample of a layer: rows of its tokens and of its busiest experts, and colours of them.

    The busiest experts have a colour each, all others one; ``names`` are those of the colours.
    """

    tokens: Sequence[int]
    experts: Sequence[int]
    groups: Sequence[int]
    names: Sequence[str]
    domains: Sequence[int]


def shown_of(routers: Sequence[str]) -> list[str]:
    """The first, the middle and the last of them, or as many as there are."""
    last = len(routers) - 1
    places = sorted({round(i * last / (_LAYERS - 1)) for i in range(_LAYERS)})
    return [routers[place] for place in places if place >= 0]


def domains_of(source: FigureResults) -> list[str]:
    """Names of the domains in the order of their numbers."""
    return list((source.results.run["tokens"] or {}).get("domains") or ())


def coloured(rows: Mapping[str, Sequence[Any]], num_domains: int) -> TokensOfLayer:
    """Rows of the table ``sample`` of one router, told apart and coloured."""
    is_expert, expert = rows["is_expert"], rows["expert"]
    tokens = [row for row, of_router in enumerate(is_expert) if not of_router]
    busiest = Counter(expert[row] for row in tokens).most_common(len(GROUPS) - 1)
    colour = {number: place for place, (number, _) in enumerate(busiest)}
    domain = rows["domain_number"]
    return TokensOfLayer(
        tokens,
        [row for row, of_router in enumerate(is_expert) if of_router and expert[row] in colour],
        [colour.get(number, len(colour)) for number in expert],
        [*(f"expert {number}" for number in colour), "others"],
        [min(max(domain[row], 0), max(num_domains - 1, 0)) for row in tokens],
    )


def likeness_of_neighbours(source: FigureResults, router: str) -> str:
    """What holds in all dimensions: whether near tokens choose alike; empty if not known."""
    same, chance, near = (
        source.layers(name).get(router)
        for name in ("near_same_choice", "near_same_choice_chance", "choice_silhouette")
    )
    if same is None or chance is None:
        return ""
    text = f"{percent(same, '.3g')} of the 10 nearest tokens, in all dimensions, choose the same "
    text += f"first expert ({percent(chance, '.3g')} by chance)"
    return text if near is None else f"{text}, silhouette {figure_text(near)}"


def _draw(source: FigureResults) -> Iterator[Chart]:
    if not source.has("sample", "x"):
        return
    domains, whole = domains_of(source), source.by_router("sample", _COLUMNS)
    samples = {router: whole[router] for router in shown_of(list(whole))}
    wide = source.layers("plane_share")
    by_choice, by_domain, texts = [], [], []
    for router, rows in samples.items():
        layer, sample = f"layer {source.names[router]}", coloured(rows, len(domains))
        groups = [sample.groups[row] for row in sample.tokens]
        crosses = [sample.groups[row] for row in sample.experts]
        points = Points(*_places(rows, sample.tokens), groups, sample.names)
        experts = Points(*_places(rows, sample.experts), crosses, are_crosses=True)
        by_choice.append(_panel(f"{layer}, by first choice", [points, experts]))
        if len(domains) > 1:
            points = Points(*_places(rows, sample.tokens), sample.domains, domains)
            by_domain.append(_panel(f"{layer}, by domain", [points]))
        if alike := likeness_of_neighbours(source, router):
            if (share := wide.get(router)) is not None:
                alike += f"; the plane holds {percent(share, '.3g')} of the variance"
            texts.append(f"{layer}: {alike}")
    alt = "; ".join(texts) or "Too few tokens to say whether near ones choose alike"
    yield Chart(
        "plane",
        "Tokens in the plane of their widest directions",
        "A sample of tokens by the two principal components of the router inputs, coloured by "
        "their first choice, and by domain if there are any. Crosses are the rows of the named "
        "experts on the same axes, in their colours, scaled to the spread of the tokens. The "
        "sentence below gives what does not depend on a plane: whether near tokens choose alike.",
        "Clusters and gaps that look like any: all but two of the directions are left out.",
        f"{alt}.",
        [*by_choice, *by_domain],
        [
            ("router", [router for router in samples for _ in samples[router]["x"]]),
            *((name, [v for rows in samples.values() for v in rows[name]]) for name in _COLUMNS),
        ],
    )


def _places(rows: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> tuple[Numbers, Numbers]:
    return [rows["x"][row] for row in numbers], [rows["y"][row] for row in numbers]


def _panel(title: str, marks: Sequence[Points]) -> Panel:
    x, y = Axis("widest direction, in units of the input"), Axis("second direction")
    return Panel(title, x, y, marks, is_wide=False)


DRAWING = Drawing("plane", 70, "tokens in the plane of their widest directions", _draw)
