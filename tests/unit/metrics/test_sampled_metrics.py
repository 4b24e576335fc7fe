"""Metrics that look at a sample of the tokens equal their definition on exactly those tokens."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.core.router import Provenance, Router, Rule, Weights
from moegeom.geometry.boundary.orders import extra_experts, order_eps
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.testing.array_source import ArraySource

EXPERTS, HIDDEN, TOP_K, TOKENS = 9, 16, 3, 3000


@pytest.fixture(scope="module")
def measured():
    random = np.random.default_rng(0)
    weight = random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
    rule = Rule(TOP_K, "softmax", Weights("scores"))
    router = Router("text/0", "text", 0, weight, rule, Provenance("made up", (), "", "F32"))
    values = random.standard_normal((TOKENS, HIDDEN)).astype(np.float32) + np.float32(0.5)
    metrics = [METRICS[name] for name in ("tokens", "orders", "directions")]
    run = RouterRun(router, ArraySource({router.name: values}), metrics)
    rows = measure_router(run).rows
    return weight, values, rows


def test_orders_and_extra_experts_are_means_over_the_tokens(measured):
    weight, values, rows = measured
    logits = values @ weight.T
    found = [row for row in rows["orders"] if row["variant"] == "as_stored"]
    assert [row["width"] for row in found] == [0.0, 2.0**-8, 2.0**-6, 2.0**-4, 0.25, 1.0]
    for row in found:
        orders = order_eps(logits, TOP_K, row["width"])
        np.testing.assert_allclose(row["order_mean"], orders.mean(), rtol=1e-3, atol=2e-3)
        extras = extra_experts(logits, TOP_K, row["width"]).mean()
        np.testing.assert_allclose(row["extra_experts_mean"], extras, rtol=1e-3, atol=2e-3)
        for least in (2, 3, 4):
            share = (orders >= least).mean()
            found_share = row[f"order_{least}_share"]
            np.testing.assert_allclose(found_share, share, rtol=1e-3, atol=2e-3)
        assert row["order_max"] == orders.max()
        assert row["order_mean_se"] > 0.0 or orders.max() == 0


def test_the_null_has_orders_of_its_own(measured):
    assert {row["variant"] for row in measured[2]["orders"]} == {"as_stored", "random"}


def test_the_resultant_is_the_length_of_the_mean_direction(measured):
    _, values, rows = measured
    unit = values.astype(np.float64) / np.linalg.norm(values.astype(np.float64), axis=1)[:, None]
    (row,) = [row for row in rows["layers"] if row["variant"] == "as_stored"]
    np.testing.assert_allclose(
        row["mean_resultant_length"], np.linalg.norm(unit.mean(axis=0)), 1e-9
    )
    assert 0.0 < row["mean_resultant_length_se"] < 0.1
