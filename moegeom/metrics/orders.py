"""Orders: how many experts nearly tie at the border of the chosen set.

For a width eps, the order of a token is the number of experts, less one, in the widest run of
consecutive sorted selection scores that crosses the border and spans at most eps; ``extra_experts``
are those left out by less than eps, which a smoothed router would run besides. Order 1 is a
near-tie of two, order 2 and more a corner where several boundaries meet; at width 0 ties are exact.
On a sample of at most 4096 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS
from moegeom.kernels.reductions.scores import EXTRAS, FIRST_ORDER, LADDER

#: Orders from which on shares are told.
_ORDERS = {2: "three", 3: "four", 4: "five"}


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["orders"].astype(np.float64)
    of_order = counts[:, FIRST_ORDER:]
    total, order = of_order.sum(axis=1), np.arange(of_order.shape[1])
    tokens = np.where(total > 0.0, total, np.nan)
    largest = np.where(of_order > 0.0, order, 0).max(axis=1)
    return {
        "orders": {
            "width": LADDER,
            "order_mean": of_order @ order / tokens,
            "extra_experts_mean": counts[:, EXTRAS] / tokens,
            **{f"order_{n}_share": of_order[:, n:].sum(axis=1) / tokens for n in _ORDERS},
            "order_max": np.where(total > 0.0, largest, np.nan),
        }
    }


METRIC = Metric(
    name="orders",
    version=2,
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
            *(
                Column(
                    f"order_{n}_share",
                    f"share of tokens where {word} or more experts tie across the border",
                    formula="order_eps",
                    has_se=True,
                )
                for n, word in _ORDERS.items()
            ),
            Column("order_max", "largest order of a token of the sample", formula="order_eps"),
        )
    },
    finish=_finish,
    invariances=("expert_relabelling", "common_row_shift"),
)
