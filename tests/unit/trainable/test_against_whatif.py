"""Oracle: the same definitions in NumPy, float64, which what-if routers are computed with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from moegeom.core.router import Weights
from moegeom.geometry.selection import SCORES
from moegeom.geometry.whatif.sinkhorn import osr_cost
from moegeom.geometry.whatif.sinkhorn import sinkhorn as numpy_plan
from moegeom.geometry.whatif.smooth import gaps, smooth_gate, smoothing_budget
from moegeom.geometry.whatif.threshold import relu_gate
from moegeom.trainable import ReLURouter, SmoothTopKRouter
from moegeom.trainable.osr import repulsive_cost, sinkhorn
from moegeom.trainable.smooth import eps_for_budget

TOKENS, EXPERTS, K, HIDDEN = 300, 12, 3, 6


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((TOKENS, EXPERTS))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("eps", [0.02, 0.3])
def test_smoothed_weights_are_those_of_numpy(logits, score, renormalise, eps):
    router = SmoothTopKRouter(EXPERTS, K, HIDDEN, eps=eps, score=score, renormalise=renormalise, bias_rate=float(score == "sigmoid"))  # fmt: skip
    router.double()
    scores = SCORES[score](logits)
    selection = logits
    if router.selection_bias is not None:
        router.selection_bias.normal_(std=0.2)
        selection = scores + router.selection_bias.numpy()
    ours = router.choose(torch.from_numpy(logits)).dense().detach()
    weights = Weights("scores", renormalise)
    truth = smooth_gate(logits, scores, selection, K, weights, router.eps.item())
    assert_allclose(ours, truth, atol=1e-6)


@pytest.mark.parametrize("extra", [0.0, 0.001, 0.5, 2.0])
def test_the_width_for_a_budget_is_that_of_numpy(logits, extra):
    found = gaps(logits, K)
    ours = eps_for_budget(torch.from_numpy(found), extra).item()
    assert_allclose(ours, smoothing_budget(found, extra).eps, rtol=1e-12)


def test_weights_of_relu_routing_are_those_of_numpy(logits):
    ours = ReLURouter(EXPERTS, K, HIDDEN).choose(torch.from_numpy(logits))
    assert_allclose(ours.dense(), relu_gate(logits, 0.0), atol=1e-15)


@pytest.mark.parametrize("steps", [1, 3, 40])
def test_costs_and_plans_are_those_of_numpy(logits, steps):
    similarity = np.tanh(logits)
    rows = np.random.default_rng(1).standard_normal((EXPERTS, HIDDEN))
    cost = osr_cost(similarity, rows, 0.5, 0.5, 0.7)
    ours = repulsive_cost(torch.from_numpy(similarity), torch.from_numpy(rows), 0.5, 0.5, 0.7)
    assert_allclose(ours, cost, atol=1e-12)
    plan = sinkhorn((-ours / 0.05).clamp(-50.0, 50.0), steps)
    assert_allclose(plan, numpy_plan(cost, 0.05, steps).share, atol=1e-6)
