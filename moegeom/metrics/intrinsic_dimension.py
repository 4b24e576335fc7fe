"""Intrinsic dimension of the router inputs: on how many coordinates the tokens really vary.

Estimates from distances to nearest neighbours: TwoNN, from the ratio of the second to the first
(``two_nn``, and ``two_nn_fitted`` on the lowest 90 % of the ratios), and Levina-Bickel with the
average of MacKay and Ghahramani for 10 and 20 neighbours (``mle_10``, ``mle_20``). Each on the
sample of about 2048 tokens, on half and on a quarter of it. Together they give a range, never one
number: estimates fall with the dimension by boundary effects (a cube of 10 dimensions reads 8.4)
and move with the scale that the sample size sets.

Bit-identical inputs and outlier tokens are left out. The dimension bounds how many cells tokens can
meet: far fewer than the binomial coefficient when it is small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.space import dimension_estimates, distinct_rows
from moegeom.kernels.reductions.samples import NUM_INPUTS


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    sample = reductions["input_sample"]
    rows = sample.inputs.astype(np.float64)
    distinct = distinct_rows(rows)
    gram = sample.gram if len(distinct) == len(rows) else None
    rows = rows[distinct]
    # the sample is in the order of a hash: its beginning is a sample too
    found = dimension_estimates(rows, gram)
    values = [value for _, _, value in found if np.isfinite(value)]
    whole = {name: value for name, size, value in found if size == len(rows)}
    return {
        "layers": {
            "intrinsic_dimension_low": min(values, default=None),
            "intrinsic_dimension_high": max(values, default=None),
            "intrinsic_dimension_two_nn": whole.get("two_nn"),
            "intrinsic_dimension_mle_20": whole.get("mle_20"),
        },
        "intrinsic_dimension": {
            "estimator": np.array([name for name, _, _ in found], dtype=object),
            "num_tokens": np.array([size for _, size, _ in found], dtype=np.int64),
            "dimension": np.array([value for _, _, value in found], dtype=np.float64),
        },
    }


METRIC = Metric(
    name="intrinsic_dimension",
    version=1,
    text="Intrinsic dimension of the router inputs as a range over estimators and sample sizes, on "
    f"a sample of about {NUM_INPUTS} tokens.",
    scope="router",
    needs=("input_sample",),
    columns={
        "layers": (
            Column(
                "intrinsic_dimension_low",
                "lowest estimate over estimators and sample sizes",
                "dimensions",
                formula="intrinsic_dimension",
            ),
            Column(
                "intrinsic_dimension_high",
                "highest of them",
                "dimensions",
                formula="intrinsic_dimension",
            ),
            Column(
                "intrinsic_dimension_two_nn",
                "TwoNN on the whole sample",
                "dimensions",
                formula="intrinsic_dimension",
            ),
            Column(
                "intrinsic_dimension_mle_20",
                "Levina-Bickel with 20 neighbours on the whole sample",
                "dimensions",
                formula="intrinsic_dimension",
            ),
        ),
        "intrinsic_dimension": (
            Column("estimator", "two_nn, two_nn_fitted, mle_10 or mle_20", "", "str"),
            Column("num_tokens", "tokens of the sample that it used", "tokens", "int"),
            Column("dimension", "estimate", "dimensions", formula="intrinsic_dimension"),
        ),
    },
    finish=_finish,
    invariances=("expert_relabelling", "common_row_shift", "positive_scaling"),
)
