"""Share of the tokens that lie nearer to a boundary than a threshold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from moegeom.core.row_keys import RANDOM
from moegeom.core.text import figure_text, percent
from moegeom.document.chart import Axis, Chart, Mark, Panel, Polyline
from moegeom.document.drawing import Drawing, FigureResults, interval

#: Quantities of the table ``margins`` that are drawn, in words.
_QUANTITIES = {
    "boundary_distance_over_norm": "boundary distance over the norm of the input",
    "margin": "margin, in units of the selection score",
    "noise_sigmas": "boundary distance in standard deviations of the noise",
    "rounding_sigmas": "boundary distance in standard deviations of bf16 rounding",
}

_COLUMNS = ("router", "quantity", "threshold", "share_below", "share_below_se")

Curve = dict[float, tuple[float | None, float | None]]


def _draw(source: FigureResults) -> Iterator[Chart]:
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
            "documents, the median layer, and the median of the random routers.",
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
    low, high = interval(shares, errors, source.blocks(worst))
    name = f"layer {source.names[worst]}"
    marks: list[Mark] = [Polyline(name, "tokens", steps, shares, low, high)]
    if len(curves) > 1:
        marks.append(Polyline("median layer", "dim", steps, middle))
    if random:
        marks.append(Polyline("random router", "random", steps, _median_of(random, steps)))
    thresholds = [x for x, m in zip(steps, middle, strict=True) if m and m < 1.0] or steps
    axis = Axis(words, "log2", low=min(thresholds), high=max(thresholds) * 2)
    least = min((m for m in middle if m), default=1e-4)
    sentence = (
        f"{words[:1].upper()}{words[1:]} below {figure_text(at)}: "
        f"{percent(curves[worst].get(at, (0.0, None))[0] or 0.0, '.3g')} of the tokens in "
        f"{name}, {percent(middle[steps.index(at)] or 0.0, '.3g')} in the median layer."
    )
    return Panel(
        "", axis, Axis("share of tokens nearer", "log10", low=least, high=1.0), marks, False
    ), sentence


def _median_of(curves: Mapping[str, Curve], steps: Sequence[float]) -> list[float | None]:
    columns = ([c[x][0] for c in curves.values() if x in c] for x in steps)
    shares = ([share for share in column if share is not None] for column in columns)
    return [median(column) if column else None for column in shares]


DRAWING = Drawing(
    "near_boundary", 40, "share of tokens nearer to a boundary than a threshold", _draw
)
