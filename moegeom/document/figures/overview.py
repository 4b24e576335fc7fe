"""Layers against figures: which layer is unlike the others, and in what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from moegeom.core.text import figure_text
from moegeom.document.chart import Axis, Chart, Heat, Panel
from moegeom.document.drawing import Drawing, FigureResults

#: Columns of ``layers`` and what they are called here, with the unit.
_COLUMNS = {
    "max_vio_global": "MaxVio",
    "load_cv_ddof0": "load CV",
    "gini": "Gini of load",
    "routing_entropy_normalised": "routing entropy, of 1",
    "margin_p50": "median margin",
    "boundary_distance_over_norm_p50": "median distance over norm",
    "bf16_flip_share": "flip under bf16 rounding",
    "gram_score_centred": "Gram score, centred",
    "max_cosine_centred": "largest row cosine",
    "mean_resultant_length": "mean resultant length",
    "overlap_routing": "co-activation overlap",
    "domain_information_share": "information on the domain",
}

#: What means nothing where the tokens are of one domain.
_DOMAIN = "domain_information_share"

#: Layers below which none can be called unlike the others.
_LEAST = 5

#: Median absolute deviations that are the full colour.
_FULL = 4.0

#: From the median absolute deviation to the standard deviation of a normal.
_NORMAL = 1.4826


def _draw(source: FigureResults) -> Iterator[Chart]:
    has_domains = source.has("domains") and len(source.results.table("domains")) > 1
    figures = {
        column: source.layers(column) for column in _COLUMNS if has_domains or column != _DOMAIN
    }
    figures = {column: values for column, values in figures.items() if values}
    routers = [r for r in source.routers if any(r in values for values in figures.values())]
    if not figures or len(routers) < _LEAST:
        return
    table = {c: [values.get(router) for router in routers] for c, values in figures.items()}
    scores = {column: _unlike(values) for column, values in table.items()}
    size, which, where = max(
        (abs(z or 0.0), column, router)
        for column, values in scores.items()
        for router, z in zip(routers, values, strict=True)
    )
    heat = Heat(
        [[scores[column][i] for column in figures] for i in range(len(routers))],
        "robust standard deviations from the median layer",
        -_FULL,
        _FULL,
        0.0,
        cells=[
            ["" if (v := table[column][i]) is None else figure_text(v) for column in figures]
            for i in range(len(routers))
        ],
    )
    yield Chart(
        "overview",
        "Layers against figures",
        "Each figure of each layer, coloured by how far it lies from the median of the layers: "
        "blue below, red above. A name of a layer leads to its row in the table.",
        "Whether a layer is wrong: layers may differ for good reasons, and all may be wrong alike.",
        f"The most unlike is layer {source.names[where]} in {_COLUMNS[which]}: "
        f"{figure_text(table[which][routers.index(where)] or 0.0)}, {figure_text(size)} robust "
        "standard deviations from the median.",
        [
            Panel(
                "",
                Axis("", names=[_COLUMNS[column] for column in figures]),
                Axis(
                    "layer",
                    names=[source.names[router] for router in routers],
                    links=[source.links[router] for router in routers],
                ),
                [heat],
            )
        ],
        [("router", routers), *table.items()],
    )


def _unlike(values: Sequence[float | None]) -> list[float | None]:
    """(x - median) / (1.4826 MAD); 0 where the layers agree."""
    numbers = [value for value in values if value is not None]
    centre = median(numbers)
    spread = _NORMAL * median(abs(value - centre) for value in numbers)
    if spread == 0.0:  # what differs at all from layers that agree is far from them
        spread = max((abs(value - centre) for value in numbers), default=0.0) / _FULL or 1.0
    return [None if value is None else (value - centre) / spread for value in values]


OVERVIEW = Drawing(
    "overview", 10, "layers against figures, coloured by what is unlike the others", _draw
)
