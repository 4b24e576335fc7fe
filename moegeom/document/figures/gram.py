"""Cosines between the rows of a router, and co-activation, experts in the order of likeness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float64

from moegeom.core.text import figure_text
from moegeom.document.chart import Axis, Chart, Heat, Panel
from moegeom.document.drawing import Drawing, Drawn

Matrix = Float64[np.ndarray, "experts experts"]


def _draw(drawn: Drawn) -> Iterator[Chart]:
    if not drawn.has("matrices", "values"):
        return
    cosines = _matrices(drawn, "row_cosine")
    together = _matrices(drawn, "coactivation")
    scores = {router: 1.0 - s for router, s in drawn.layers("gram_score_centred").items()}
    worst = sorted(scores, key=lambda router: -scores[router])[: 4 if together else 8]
    shown = [router for router in drawn.routers if router in worst and router in cosines]
    if not shown:
        return
    orders = {router: by_likeness(cosines[router]) for router in shown}
    panels = [
        Panel(
            f"layer {drawn.names[r]}, cosine of rows",
            Axis("expert, in the order of likeness"),
            Axis(""),
            [Heat(_ordered(cosines[r], orders[r]), "cosine of centred rows", -1.0, 1.0, 0.0)],
            is_wide=False,
        )
        for r in shown
    ]
    over = "frequency over even chance"
    panels += [
        Panel(
            f"layer {drawn.names[r]}, co-activation",
            Axis("expert, in the same order"),
            Axis(""),
            [Heat(_ordered(together[r], orders[r]), over, 0.125, 8.0, 1.0, "log2")],
            is_wide=False,
        )
        for r in shown
        if r in together
    ]
    random, best = drawn.layers("gram_score_random"), drawn.layers("gram_score_best")
    most = drawn.layers("max_cosine_centred")
    said = [
        f"layer {drawn.names[r]}: Gram score {figure_text(1.0 - scores[r])} (random rows "
        f"{figure_text(random[r])}, best possible {figure_text(best[r])}), largest cosine "
        f"{figure_text(most[r])}"
        for r in shown
        if r in random and r in best and r in most
    ]
    kinds = [(r, name, held) for name, of in _NAMES.items() for r, held in _rows(drawn, name, of)]
    yield Chart(
        "gram",
        "Rows of the router, and which experts go together",
        "Left, how alike the directions of two experts are, with the mean of all rows taken off: "
        "-1 opposite, blue, 1 equal, red. Experts stand in the order of a clustering by likeness, "
        "so that families of experts are squares on the diagonal. Then, in the same order, how "
        "often two experts are chosen together, over even chance. Layers with the lowest score.",
        "What experts compute: rows say who is asked, not what is answered.",
        "; ".join(said) + ".",
        panels,
        [
            ("router", [r for r, _, held in kinds for row in held for _ in row[1]]),
            ("matrix", [name for _, name, held in kinds for row in held for _ in row[1]]),
            ("expert", [row[0] for _, _, held in kinds for row in held for _ in row[1]]),
            (
                "other_expert",
                [
                    row[0] + 1 + i
                    for _, _, held in kinds
                    for row in held
                    for i in range(len(row[1]))
                ],
            ),
            ("value", [value for _, _, held in kinds for row in held for value in row[1]]),
        ],
    )


#: Matrices that are drawn; of how many layers their numbers are given.
_NAMES = {"row_cosine": 8, "coactivation": 4}


def _rows(
    drawn: Drawn, matrix: str, most: int
) -> Iterator[tuple[str, list[tuple[int, list[float | None]]]]]:
    held = drawn.by_router("matrices", ["expert", "values"], matrix=matrix)
    scores = drawn.layers("gram_score_centred")
    worst = sorted((r for r in held if r in scores), key=lambda router: scores[router])[:most]
    for router in drawn.routers:
        if router in worst:
            row = held[router]
            yield router, list(zip(row["expert"], row["values"], strict=True))


def _matrices(drawn: Drawn, name: str) -> dict[str, Matrix]:
    """Whole matrices by router; nan on the diagonal and where nothing is known."""
    found = {}
    for router, rows in _rows(drawn, name, _NAMES[name]):
        matrix = np.full((len(rows), len(rows)), np.nan)
        for expert, values in rows:
            row = np.array([np.nan if v is None else v for v in values], np.float64)
            if len(row) == len(rows) - 1 - expert:
                matrix[expert, expert + 1 :] = matrix[expert + 1 :, expert] = row
        found[router] = matrix
    return found


def by_likeness(cosine: Matrix) -> list[int]:
    """Experts so that like ones stand together: average linkage of 1 - cosine, leaves in order."""
    from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering

    if len(cosine) < 3:
        return list(range(len(cosine)))
    first, second = np.triu_indices(len(cosine), 1)
    apart = 1.0 - np.nan_to_num(cosine[first, second])
    tree = linkage(apart, "average")
    tree = optimal_leaf_ordering(tree, apart) if len(cosine) <= 128 else tree
    return leaves_list(tree).tolist()


def _ordered(matrix: Matrix, order: Sequence[int]) -> list[list[float | None]]:
    rows = matrix[np.ix_(order, order)].tolist()
    return [[None if value != value else value for value in row] for row in rows]


DRAWING = Drawing("gram", 60, "cosines of router rows, and which experts go together", _draw)
