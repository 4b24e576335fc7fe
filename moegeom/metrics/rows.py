"""Rows as stored: lengths, zero rows, rows that are not finite, and duplicate rows.

Duplicate rows are bit-identical, with equal biases: no token tells the two experts apart, and ties
go to the lower number. A zero row has the same logit for every token. These are faults of a file or
of a merge, not of the data. Lengths are of the raw rows; see ``effective_router`` for the geometry
that routing depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    router = facts.router
    biases = [b[:, None] for b in (router.logit_bias, router.selection_bias) if b is not None]
    finite = np.asarray(np.isfinite(router.weight).all(axis=1))
    for bias in biases:
        finite &= np.isfinite(bias).all(axis=1)
    own = np.arange(router.num_experts)
    norms = np.full(router.num_experts, np.nan)
    # summed in float64 without a float64 copy of the rows
    squares = np.einsum("ij,ij->i", router.weight, router.weight, dtype=np.float64)
    norms[finite] = np.sqrt(squares[finite])
    duplicate = _first_equal([router.weight, *biases], norms)
    median = float(np.median(norms[finite])) if finite.any() else 0.0
    return {
        "layers": {
            "num_non_finite_rows": int((~finite).sum()),
            "num_non_finite_gain": None
            if router.gain is None
            else int((~np.isfinite(router.gain)).sum()),
            "num_duplicate_rows": int((duplicate != own).sum()),
            "num_zero_rows": int((norms == 0.0).sum()),
            "row_norm_median": median if finite.any() else None,
            "row_norm_max_over_median": float(norms[finite].max()) / median if median else None,
        },
        "experts": {
            "expert": own,
            "row_norm": norms,
            "is_row_finite": finite,
            "duplicate_of": np.where(duplicate != own, duplicate, -1),
        },
    }


def _first_equal(columns: Sequence[np.ndarray], norms: np.ndarray) -> np.ndarray:
    """For each row the first row that equals it in all columns; itself when there is none.

    Equal rows have equal norms, so only rows that share theirs are compared; nan marks rows that
    are not finite, which equal nothing.
    """
    seen: dict[float, list[int]] = {}
    first = np.arange(len(norms))
    for row, norm in enumerate(norms.tolist()):
        alike = seen.setdefault(norm, [])
        for other in alike if norm == norm else ():
            if all(np.array_equal(column[row], column[other]) for column in columns):
                first[row] = other
                break
        else:
            alike.append(row)
    return first


METRIC = Metric(
    name="rows",
    version=1,
    text="Length of each router row; rows that are not finite, zero, or bit-equal to an earlier "
    "one, biases included: no token tells two equal experts apart.",
    scope="weights",
    needs=(),
    columns={
        "layers": (
            Column(
                "num_non_finite_rows",
                "rows with nan or infinity, biases included",
                "experts",
                "int",
            ),
            Column(
                "num_non_finite_gain",
                "entries of the gain of the norm in front that are nan or infinite",
                "",
                "int",
            ),
            Column("num_duplicate_rows", "rows equal to an earlier row", "experts", "int"),
            Column("num_zero_rows", "rows of zeros", "experts", "int"),
            Column("row_norm_median", "median length of a row", "weight"),
            Column("row_norm_max_over_median", "longest row over the median length"),
        ),
        "experts": (
            Column("expert", "expert number", "expert", "int"),
            Column("row_norm", "Euclidean length of the router row", "weight"),
            Column("is_row_finite", "row and biases are finite", "", "bool"),
            Column(
                "duplicate_of", "earlier expert with the same row and bias, or -1", "expert", "int"
            ),
        ),
    },
    finish=_finish,
    invariances=(),
)
