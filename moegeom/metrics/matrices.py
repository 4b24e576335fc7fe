"""Cosines of the effective rows, pair by pair: what the Gram heat map shows.

Cosines between the centred rows of the effective router, whose root mean square is one minus the
Gram score. Half precision is enough for a picture: three digits. Routers of more than 512 experts
have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.gram import EffectiveRows, cosines

#: Experts whose matrix is kept: 260 kB of numbers for each router.
MOST_EXPERTS = 512

#: The same for every matrix of a router.
COLUMNS = (
    Column("matrix", "row_cosine, or coactivation", "", "str"),
    Column("expert", "expert number: the row of the matrix", "expert", "int"),
    Column("values", "values for this expert and each later one, three digits", "1", "list"),
)


def upper_triangle(name: str, matrix: Float64[np.ndarray, "experts experts"]) -> dict[str, Any]:
    """Rows of the table ``matrices``: the values right of the diagonal, in half precision."""
    rounded = matrix.astype(np.float16)
    rows = [row[number + 1 :].tolist() for number, row in enumerate(rounded)]
    if np.isnan(rounded).any():
        rows = [[None if value != value else value for value in row] for row in rows]
    return {
        "matrix": np.full(len(matrix), name),
        "expert": np.arange(len(matrix)),
        "values": rows,
    }


def _finish(quantities: Mapping[str, Any], facts: RouterFacts) -> Values:
    rows: EffectiveRows = quantities["effective_rows"]
    experts = len(rows.finite)
    if facts.is_random or experts > MOST_EXPERTS:
        return {}
    matrix = np.full((experts, experts), np.nan)
    matrix[np.ix_(rows.finite, rows.finite)] = cosines(rows.gram)
    return {"matrices": upper_triangle("row_cosine", matrix)}


METRIC = Metric(
    name="matrices",
    version=1,
    text="Cosines of the centred rows of the effective router, for every pair of experts.",
    scope="weights",
    needs=("effective_rows",),
    columns={"matrices": COLUMNS},
    finish=_finish,
    is_for_figures=True,
)
