"""Orders: how many experts nearly tie at the border of the chosen set.

For a width eps, the order of a token is the number of experts, less one, in the widest run of
consecutive sorted selection scores that crosses the border and spans at most eps; ``extra_experts``
are those left out by less than eps, which a smoothed router would run besides. Order 1 is a
near-tie of two, order 2 and more a corner where several boundaries meet. On a sample of at most
4096 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS
from moegeom.kernels.reductions.scores import EXTRAS, LADDER, MULTIPLE, ORDERS, TOKENS


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["orders"].astype(np.float64)
    tokens = np.where(counts[:, TOKENS] > 0.0, counts[:, TOKENS], np.nan)
    return {
        "orders": {
            "width": LADDER,
            "order_mean": counts[:, ORDERS] / tokens,
            "extra_experts_mean": counts[:, EXTRAS] / tokens,
            "order_2_share": counts[:, MULTIPLE] / tokens,
        }
    }


METRIC = Metric(
    name="orders",
    version=1,
    text="Experts that nearly tie at the border of the chosen set, on a sample of at most "
    f"{SMALL_SAMPLE_TOKENS} tokens, for a ladder of widths.",
    scope="router",
    needs=("orders",),
    columns={
        "orders": (
            Column("width", "experts count as tied within this", "selection score"),
            Column(
                "order_mean",
                "mean order: experts in the widest tie across the border, less 1",
                formula="order_eps",
                has_se=True,
            ),
            Column(
                "extra_experts_mean",
                "mean number of experts left out by less than the width",
                "experts",
                formula="extra_experts",
                has_se=True,
            ),
            Column(
                "order_2_share",
                "share of tokens where three or more experts tie across the border",
                formula="order_eps",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("expert_relabelling", "common_row_shift"),
)
