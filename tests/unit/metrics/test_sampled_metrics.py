"""Metrics that look at a sample of the tokens equal their definition on exactly those tokens."""

import numpy as np

from moegeom.core.router import Rule
from moegeom.geometry.boundary.orders import extra_experts, order_eps
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.testing.array_source import ArraySource
from tests.unit.scan.routers import SOFTMAX, normal_rows, router_with

TOP_K = 3


def test_orders_and_extra_experts_are_means_over_the_tokens():
    router = router_with(normal_rows(9, 16), Rule(TOP_K, "softmax", SOFTMAX))
    values = normal_rows(3000, 16, seed=1) + np.float32(0.5)
    metrics = [METRICS[name] for name in ("tokens", "orders")]
    tables = measure_router(RouterRun(router, ArraySource({router.name: values}), metrics)).rows
    assert {row["variant"] for row in tables["orders"]} == {"as_stored", "random"}
    logits = values @ router.weight.T
    rows = [row for row in tables["orders"] if row["variant"] == "as_stored"]
    assert [row["width"] for row in rows] == [0.0, 2.0**-8, 2.0**-6, 2.0**-4, 0.25, 1.0]
    for row in rows:
        orders = order_eps(logits, TOP_K, row["width"])
        expected = {f"order_{least}_share": (orders >= least).mean() for least in (2, 3, 4)}
        expected["order_mean"] = orders.mean()
        expected["extra_experts_mean"] = extra_experts(logits, TOP_K, row["width"]).mean()
        for column, mean in expected.items():
            np.testing.assert_allclose(row[column], mean, rtol=1e-3, atol=2e-3, err_msg=column)
        assert row["order_max"] == orders.max()
        assert row["order_mean_se"] > 0.0 or orders.max() == 0
