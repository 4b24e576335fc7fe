"""The share of dropped tokens is that of the router of Switch Transformers, sequence by sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersTop1Router,
)

from moegeom.core.router import Provenance, Router, Rule, Weights
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.testing.array_source import ArraySource

SEQUENCES, LENGTH, HIDDEN, EXPERTS = 40, 48, 16, 4


def measured(capacity: int | None, weight: np.ndarray, values: np.ndarray):
    """The row of the router as stored, and why metrics are null."""
    rule = Rule(1, "softmax", Weights("scores"), capacity=capacity)
    router = Router("text/0", "text", 0, weight, rule, Provenance("made up", (), "", "F32"))
    source = ArraySource({"text/0": values.reshape(-1, HIDDEN)}, document_tokens=LENGTH)
    found = measure_router(RouterRun(router, source, METRICS.all()))
    rows = [row for row in found.rows["layers"] if row["variant"] == "as_stored"]
    return next(row for row in rows if row["population"] == "all"), found.facts["reasons"]


@pytest.mark.parametrize("capacity", [1, 7, 12, 20, 48])
def test_dropped_tokens_are_those_that_the_router_masks(capacity):
    torch.manual_seed(0)
    config = SwitchTransformersConfig(
        d_model=HIDDEN, num_experts=EXPERTS, expert_capacity=capacity, router_bias=False
    )
    router = SwitchTransformersTop1Router(config).eval()
    values = torch.randn(SEQUENCES, LENGTH, HIDDEN) + 0.5 * torch.randn(SEQUENCES, 1, HIDDEN)
    with torch.no_grad():
        kept = router(values)[0].sum().item()
    weight = router.classifier.weight.detach().numpy()
    row, _ = measured(capacity, weight, values.numpy())
    expected = 1.0 - kept / (SEQUENCES * LENGTH)
    np.testing.assert_allclose(row["capacity_dropped_share"], expected, rtol=1e-12, atol=1e-15)
    assert row["expert_capacity"] == capacity
    assert (row["capacity_dropped_share_se"] > 0.0) == (expected > 0.0)


def test_without_a_capacity_the_share_is_null_with_the_reason():
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((EXPERTS, HIDDEN), dtype=np.float32)
    values = generator.standard_normal((SEQUENCES, LENGTH, HIDDEN), dtype=np.float32)
    row, reasons = measured(None, weight, values)
    assert row.get("capacity_dropped_share") is None
    assert "tokens of a sequence that an expert takes" in reasons["expert_capacity"]
