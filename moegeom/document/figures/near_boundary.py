"""How near tokens are to a boundary, and how many flip."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from moegeom.core.row_keys import AS_STORED, RANDOM, is_random, under_random
from moegeom.core.text import figure_text, percent
from moegeom.document.chart import Axis, Bars, Chart, Heat, Mark, Panel, Polyline, percents
from moegeom.document.drawing import Drawing, FigureResults, interval, middle
from moegeom.document.figures.load import units_of

#: Quantities of the table ``margins`` that are drawn, in words.
_QUANTITIES = {
    "boundary_distance_over_norm": "boundary distance over the norm of the input",
    "margin": "margin, in units of the selection score",
    "noise_sigmas": "boundary distance in standard deviations of the noise",
    "rounding_sigmas": "boundary distance in standard deviations of bf16 rounding",
}

_COLUMNS = ("router", "quantity", "threshold", "share_below", "share_below_se")

Curve = dict[float, tuple[float | None, float | None]]


def _draw_near_boundary(source: FigureResults) -> Iterator[Chart]:
    if not source.has("margins", "share_below"):
        return
    columns = source.columns("margins", _COLUMNS)
    random = source.columns("margins", _COLUMNS, variant=RANDOM)
    panels, sentences = [], []
    for quantity, words in _QUANTITIES.items():
        curves = _curves(columns, quantity)
        if not curves:
            continue
        panel, sentence = _panel(source, words, curves, _curves(random, quantity))
        panels.append(panel)
        sentences.append(sentence)
    if panels:
        yield Chart(
            "near_boundary",
            "How near tokens are to flipping",
            "The share of tokens nearer to a boundary than the threshold below: what noise of that "
            "size can flip. The layer with the largest share and its 95 % interval over "
            f"{units_of(source)}, the median layer, and the median of the random routers.",
            "What a flip costs. A change smaller than the boundary distance cannot flip a token; a "
            "larger one may, and noise has no largest size.",
            " ".join(sentences),
            panels,
            [(name, columns[name]) for name in _COLUMNS],
        )


def _curves(columns: Mapping[str, list[Any]], quantity: str) -> dict[str, Curve]:
    """By router: threshold to share and its error."""
    curves: dict[str, Curve] = {}
    for router, what, threshold, share, error in zip(*(columns[c] for c in _COLUMNS), strict=True):
        if what == quantity and share is not None:
            curves.setdefault(router, {})[threshold] = (share, error)
    return curves


def _panel(
    source: FigureResults, words: str, curves: Mapping[str, Curve], random: Mapping[str, Curve]
) -> tuple[Panel, str]:
    steps = sorted({x for curve in curves.values() for x in curve})
    middle = _median_of(curves, steps)
    # the threshold at which the median layer has a share near a hundredth tells exposures apart
    at = min(steps, key=lambda x: abs((middle[steps.index(x)] or 0.0) - 0.01))
    worst = max(curves, key=lambda router: curves[router].get(at, (0.0, None))[0] or 0.0)
    points = [curves[worst].get(x, (None, None)) for x in steps]
    shares, errors = [share for share, _ in points], [error for _, error in points]
    ends = interval(shares, errors, source.blocks(worst))
    name = f"layer {source.names[worst]}"
    marks: list[Mark] = [Polyline(name, "tokens", steps, *map(percents, (shares, *ends)))]
    if len(curves) > 1:
        marks.append(Polyline("median layer", "dim", steps, percents(middle)))
    if random:
        of_random = percents(_median_of(random, steps))
        marks.append(Polyline("random router", "random", steps, of_random))
    thresholds = [x for x, m in zip(steps, middle, strict=True) if m and m < 1.0] or steps
    axis = Axis(words, "log2", low=min(thresholds), high=max(thresholds) * 2)
    least = min((m for m in middle if m), default=1e-4)
    sentence = (
        f"{words[:1].upper()}{words[1:]} below {figure_text(at)}: "
        f"{percent(curves[worst].get(at, (0.0, None))[0] or 0.0, '.3g')} of the tokens in "
        f"{name}, {percent(middle[steps.index(at)] or 0.0, '.3g')} in the median layer."
    )
    share = Axis("tokens nearer, %", "log10", low=100.0 * least, high=100.0)
    return Panel("", axis, share, marks, False), sentence


def _median_of(curves: Mapping[str, Curve], steps: Sequence[float]) -> list[float | None]:
    columns = ([c[x][0] for c in curves.values() if x in c] for x in steps)
    shares = ([share for share in column if share is not None] for column in columns)
    return [median(column) if column else None for column in shares]


NEAR_BOUNDARY = Drawing(
    "near_boundary",
    40,
    "share of tokens nearer to a boundary than a threshold",
    _draw_near_boundary,
)


def _draw_flips(source: FigureResults) -> Iterator[Chart]:
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
        Bars(text, role, percents(values))
        for text, role, values in (
            ("worst layer", "other", [shares[name][worst[name]] for name in shares]),
            ("median layer", "tokens", [middle(values) for values in shares.values()]),
            ("random router, median", "random", [middle(random[name]) for name in shares]),
        )
    ]
    routers = [router for router in source.routers if any(router in v for v in shares.values())]
    table = [[shares[name].get(router) for router in routers] for name in shares]
    most = max(max(values.values()) for values in shares.values())
    layers = Heat(
        [*map(percents, table)],
        "tokens that flip, %",
        0.0,
        100.0 * (most or 1.0),
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
            Panel("", Axis("tokens that flip, %"), Axis("", names=list(shares)), marks),
            Panel(
                "",
                Axis("layer", names=[source.names[router] for router in routers]),
                Axis("", names=list(shares)),
                [layers],
            ),
        ],
        [("router", routers), *zip(shares, table, strict=True)],
    )


FLIPS = Drawing("flips", 50, "share of tokens that flip under each arithmetic", _draw_flips)
