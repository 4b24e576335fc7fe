"""Projections of the rows: what a baseline keeps of them.

Each centred effective row times a fixed random matrix of 32 columns. Distances between rows, and
between a row and its former self, survive within 12 %, so that two checkpoints can be compared row
by row from their results alone. Nothing else can be read off the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import NUM_PROJECTIONS, Column, Metric, RouterFacts, Values
from moegeom.geometry.gram import EffectiveRows
from moegeom.geometry.rows import projected


def _finish(quantities: Mapping[str, Any], facts: RouterFacts) -> Values:
    rows: EffectiveRows = quantities["effective_rows"]
    experts = np.arange(len(rows.finite))
    if not rows.finite.all():
        return {"layers": {}, "experts": {"expert": experts}}
    with np.errstate(over="ignore"):  # rows beyond float32 give no baseline: that is refused there
        signature, mean = _float32(rows)
    return {
        "layers": {"mean_row_projections": mean},
        "experts": {"expert": experts, "row_projections": list(signature)},
    }


def _float32(rows: EffectiveRows) -> tuple[np.ndarray, np.ndarray]:
    signature = projected(rows.centred, NUM_PROJECTIONS).astype(np.float32)
    return signature, projected(rows.mean[None], NUM_PROJECTIONS)[0].astype(np.float32)


METRIC = Metric(
    name="signature",
    version=1,
    text="Seeded projections of the centred effective rows: distances between rows survive, the "
    "rows themselves do not.",
    scope="weights",
    needs=("effective_rows",),
    columns={
        "layers": (
            Column(
                "mean_row_projections",
                "projections of the mean effective row, which a common shift changes",
                "weight",
                "list",
                "row_projections",
                changes_with=("common_row_shift",),
            ),
        ),
        "experts": (
            Column("expert", "expert number", "expert", "int"),
            Column(
                "row_projections",
                "32 projections of the centred effective row; missing when a row is not finite",
                "weight",
                "list",
                "row_projections",
                changes_with=("common_row_shift",),
            ),
        ),
    },
    finish=_finish,
    invariances=("common_row_shift", "gain_folding"),
)
