"""Router rows: their lengths, and experts that are the same row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    router = facts.router
    columns = [router.weight]
    columns += [
        bias[:, None] for bias in (router.logit_bias, router.selection_bias) if bias is not None
    ]
    rows = np.concatenate([column.astype(np.float64) for column in columns], axis=1)
    _, first, same = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    twin = first[same.reshape(-1)]
    norms = np.linalg.norm(router.weight.astype(np.float64), axis=1)
    own = np.arange(router.num_experts)
    return {
        "layers": {
            "num_twin_rows": int((twin != own).sum()),
            "num_zero_rows": int((norms == 0.0).sum()),
            "row_norm_median": float(np.median(norms)),
            "row_norm_max_over_median": float(norms.max() / np.median(norms))
            if np.median(norms) > 0.0
            else None,
        },
        "experts": {
            "expert": own,
            "row_norm": norms,
            "twin_of": np.where(twin != own, twin, -1),
        },
    }


METRIC = Metric(
    name="rows",
    version=1,
    text="Length of each router row, zero rows, and rows bit-equal to an earlier one (biases "
    "included): of two equal experts the later one is chosen only together with the earlier.",
    scope="weights",
    needs=(),
    columns={
        "layers": (
            Column("num_twin_rows", "rows equal to an earlier row", "experts", "int"),
            Column("num_zero_rows", "rows of zeros", "experts", "int"),
            Column("row_norm_median", "median length of a row", "weight"),
            Column("row_norm_max_over_median", "longest row over the median length"),
        ),
        "experts": (
            Column("expert", "expert number", "expert", "int"),
            Column("row_norm", "Euclidean length of the router row", "weight"),
            Column("twin_of", "earlier expert with the same row and bias, or -1", "expert", "int"),
        ),
    },
    finish=_finish,
    invariances=(),
)
