"""Cosines between router rows, and co-activation; experts ordered by likeness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.core.text import figure_text
from moegeom.document.chart import Axis, Chart, Heat, Panel
from moegeom.document.drawing import Drawing, FigureResults

#: Layers that are drawn: as many as stand side by side.
_MOST = 3

Matrix = Float64[np.ndarray, "experts experts"]

Rows = list[tuple[int, list[float | None]]]


def _draw(source: FigureResults) -> Iterator[Chart]:
    if not source.has("matrices", "values"):
        return
    scores = source.layers("gram_score_centred")
    lowest = sorted(scores, key=lambda router: scores[router])[:_MOST]
    rows = _rows(source, lowest)
    cosines, together = (_whole(rows[name]) for name in _NAMES)
    routers = list(cosines)
    if not routers:
        return
    orders = {router: by_likeness(cosines[router]) for router in routers}
    panels = [
        Panel(
            f"layer {source.names[r]}, cosine of rows",
            Axis("expert, in the order of likeness"),
            Axis(""),
            [Heat(_ordered(cosines[r], orders[r]), "cosine of centred rows", -1.0, 1.0, 0.0)],
            is_wide=False,
        )
        for r in routers
    ]
    over = "frequency over even chance"
    panels += [
        Panel(
            f"layer {source.names[r]}, co-activation",
            Axis("expert, in the same order"),
            Axis(""),
            [Heat(_ordered(together[r], orders[r]), over, 0.125, 8.0, 1.0, "log2")],
            is_wide=False,
        )
        for r in routers
        if r in together
    ]
    random, best = source.layers("gram_score_random"), source.layers("gram_score_best")
    most = source.layers("max_cosine_centred")
    sentences = [
        f"layer {source.names[r]}: Gram score {figure_text(scores[r])} (random rows "
        f"{figure_text(random[r])}, best possible {figure_text(best[r])}), largest cosine "
        f"{figure_text(most[r])}"
        for r in routers
        if r in random and r in best and r in most
    ]
    kinds = [(r, name, part) for name in _NAMES for r, part in rows[name].items()]
    yield Chart(
        "gram",
        "Rows of the router, and which experts go together",
        "First, how alike the directions of two experts are, with the mean of all rows taken off: "
        "-1 opposite, blue, 1 equal, red. Experts stand in the order of a clustering by likeness, "
        "so that families of experts are squares on the diagonal. Then, in the same order, how "
        "often two experts are chosen together, over even chance. Layers with the lowest score.",
        "What experts compute: rows say who is asked, not what is answered.",
        "; ".join(sentences) + ".",
        panels,
        [
            ("router", [r for r, _, part in kinds for _ in part]),
            ("matrix", [name for _, name, part in kinds for _ in part]),
            ("expert", [expert for _, _, part in kinds for expert, _ in part]),
            ("values_for_later_experts", [_cells(row) for _, _, part in kinds for _, row in part]),
        ],
    )


#: Matrices that are drawn, side by side.
_NAMES = ("row_cosine", "coactivation")


def _cells(values: Sequence[float | None]) -> str:
    """A row of a matrix in one cell: a column for each pair would be a hundred times as long."""
    return " ".join("" if value is None else f"{value:.4g}" for value in values)


def _rows(source: FigureResults, routers: Sequence[str]) -> dict[str, dict[str, Rows]]:
    """By matrix and router: experts, each with its values for the later ones."""
    matrices: dict[str, dict[str, Rows]] = {name: {} for name in _NAMES}
    by_router = source.by_router("matrices", ["matrix", "expert", "values"], router=routers)
    for router, columns in by_router.items():
        for name, expert, values in zip(*columns.values(), strict=True):
            if name in matrices:
                matrices[name].setdefault(router, []).append((expert, values))
    return matrices


def cosines_of(source: FigureResults, routers: Sequence[str]) -> dict[str, Matrix]:
    """Cosines of centred rows by router, of those that have them; nan on the diagonal."""
    if not source.has("matrices", "values"):
        return {}
    return _whole(_rows(source, routers)["row_cosine"])


def _whole(rows: Mapping[str, Rows]) -> dict[str, Matrix]:
    """Whole matrices by router; nan on the diagonal and where nothing is known."""
    matrices = {}
    for router, listed in rows.items():
        matrix = np.full((len(listed), len(listed)), np.nan)
        for expert, values in listed:
            row = np.array([np.nan if v is None else v for v in values], np.float64)
            if len(row) == len(listed) - 1 - expert:
                matrix[expert, expert + 1 :] = matrix[expert + 1 :, expert] = row
        matrices[router] = matrix
    return matrices


def by_likeness(cosine: Matrix) -> list[int]:
    """Experts so that like ones stand together: average linkage of 1 - cosine, leaves in order."""
    from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering

    if len(cosine) < 3:
        return list(range(len(cosine)))
    first, second = np.triu_indices(len(cosine), 1)
    apart = np.clip(1.0 - np.nan_to_num(cosine[first, second]), 0.0, 2.0)
    tree = linkage(apart, "average")
    tree = optimal_leaf_ordering(tree, apart) if len(cosine) <= 128 else tree
    return leaves_list(tree).tolist()


def _ordered(matrix: Matrix, order: Sequence[int]) -> list[list[float | None]]:
    rows = matrix[np.ix_(order, order)].tolist()
    return [[None if value != value else value for value in row] for row in rows]


DRAWING = Drawing("gram", 60, "cosines of router rows, and which experts go together", _draw)
