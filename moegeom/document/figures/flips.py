"""Share of the choices that flip under another arithmetic, another run, another checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.core.row_keys import AS_STORED, RANDOM, is_random, under_random
from moegeom.core.text import percent
from moegeom.document.chart import Axis, Bars, Chart, Heat, Panel
from moegeom.document.drawing import Drawing, FigureResults, middle


def _draw(source: FigureResults) -> Iterator[Chart]:
    if not source.has("layers", "flipped_share"):
        return
    variants = source.results.columns("variants", ["variant", "text"])
    names = [v for v in variants["variant"] if v not in (AS_STORED, RANDOM) and not is_random(v)]
    shares = {name: source.layers("flipped_share", variant=name) for name in names}
    shares = {name: values for name, values in shares.items() if values}
    if not shares:
        return
    random = {name: source.layers("flipped_share", variant=under_random(name)) for name in shares}
    worst = {name: max(values, key=lambda r: values[r]) for name, values in shares.items()}
    marks = [
        Bars("worst layer", "other", [shares[name][worst[name]] for name in shares]),
        Bars("median layer", "tokens", [middle(values) for values in shares.values()]),
        Bars("random router, median", "random", [middle(random[name]) for name in shares]),
    ]
    routers = [router for router in source.routers if any(router in v for v in shares.values())]
    table = [[shares[name].get(router) for router in routers] for name in shares]
    most = max(max(values.values()) for values in shares.values())
    layers = Heat(
        table,
        "share of tokens that flip",
        0.0,
        most or 1.0,
        cells=[["" if v is None else percent(v, ".2g") for v in row] for row in table],
    )
    yield Chart(
        "flips",
        "What flips under another arithmetic",
        "The share of tokens whose set of experts is another one, on the same recorded inputs: in "
        "the layer that flips most, in the median layer, and in that of the random routers; below, "
        "in every layer.",
        "A wrong answer: a flipped expert is not one. Inputs of deeper layers would differ too.",
        "; ".join(
            f"{name}: {percent(shares[name][worst[name]], '.3g')} in layer "
            f"{source.names[worst[name]]}, {percent(middle(shares[name]) or 0.0, '.3g')} in "
            "the median layer"
            for name in shares
        ),
        [
            Panel("", Axis("share of tokens that flip"), Axis("", names=list(shares)), marks),
            Panel(
                "",
                Axis("layer", names=[source.names[router] for router in routers]),
                Axis("", names=list(shares)),
                [layers],
            ),
        ],
        [("router", routers), *zip(shares, table, strict=True)],
    )


DRAWING = Drawing("flips", 50, "share of tokens that flip under each arithmetic", _draw)
