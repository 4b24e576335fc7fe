"""Oracle: gates of other routers, written again in torch from their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moegeom.core.router import Weights
from moegeom.geometry.selection import SCORES
from moegeom.geometry.whatif.quotas import expert_choice
from moegeom.geometry.whatif.sinkhorn import osr_cost, sinkhorn
from moegeom.geometry.whatif.smooth import smooth_gate
from moegeom.geometry.whatif.threshold import relu_gate

TOKENS, EXPERTS, K = 64, 10, 3


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((TOKENS, EXPERTS))


def faded(q: torch.Tensor, eps: float, a: float = 1.0, b: float = 50.0) -> torch.Tensor:
    last = q.topk(K, dim=-1).values[:, -1:]
    u = (q - last + eps) / eps
    inside = u.clamp(1e-300, 1 - 1e-16)
    s = inside.pow(a) / (inside.pow(a) + (1 - inside).pow(b))
    return torch.where(u <= 0, torch.zeros_like(s), torch.where(u >= 1, torch.ones_like(s), s))


@pytest.mark.parametrize("eps", [0.05, 0.5, 3.0])
def test_the_smoothed_softmax_gate(logits, eps):
    z = torch.tensor(logits)
    powers = z.exp() * faded(z, eps)
    found = smooth_gate(logits, logits, logits, K, Weights("softmax_of_selected_logits"), eps)
    np.testing.assert_allclose(found, powers / powers.sum(-1, keepdim=True), rtol=1e-12)
    # softmax over all, then renormalised, is the same gate
    scores = SCORES["softmax"](logits)
    weights = Weights("scores", renormalise=True)
    np.testing.assert_allclose(
        smooth_gate(logits, scores, logits, K, weights, eps), found, rtol=1e-12
    )


@pytest.mark.parametrize("eps", [0.05, 0.5, 3.0])
def test_the_smoothed_softmax_gate_that_is_not_renormalised(logits, eps):
    z = torch.tensor(logits)
    scores = SCORES["softmax"](logits)
    found = smooth_gate(logits, scores, logits, K, Weights("scores"), eps)
    np.testing.assert_allclose(found, z.softmax(-1) * faded(z, eps), rtol=1e-12)


@pytest.mark.parametrize("eps", [0.01, 0.1, 0.6])
def test_the_smoothed_sigmoid_gate_has_its_strip_in_biased_scores(logits, eps):
    z = torch.tensor(logits)
    bias = np.random.default_rng(1).uniform(-0.2, 0.2, EXPERTS)
    selection = z.sigmoid() + torch.tensor(bias)
    gates = z.sigmoid() * faded(selection, eps)
    expected = 2.5 * gates / (gates.sum(-1, keepdim=True) + 1e-20)
    weights = Weights("scores", renormalise=True, epsilon=1e-20, scale=2.5)
    scores = SCORES["sigmoid"](logits)
    found = smooth_gate(logits, scores, scores + bias, K, weights, eps)
    np.testing.assert_allclose(found, expected, rtol=1e-11)
    selected = Weights("sigmoid_of_selected_logits", renormalise=True, epsilon=1e-20, scale=2.5)
    other = smooth_gate(logits, logits, scores + bias, K, selected, eps)
    np.testing.assert_allclose(other, expected, rtol=1e-11)


def test_the_smoothed_gate_has_the_slope_that_autograd_finds(logits):
    eps, step = 0.5, 1e-7
    weights = Weights("softmax_of_selected_logits")
    direction = np.random.default_rng(2).standard_normal(logits.shape)
    moved = [
        smooth_gate(z, z, z, K, weights, eps)
        for z in (logits + step * direction, logits - step * direction)
    ]
    z = torch.tensor(logits, requires_grad=True)
    powers = z.exp() * faded(z, eps)
    weighing = np.random.default_rng(3).standard_normal(logits.shape)
    (powers / powers.sum(-1, keepdim=True) * torch.tensor(weighing)).sum().backward()
    assert z.grad is not None
    slope = (z.grad.numpy() * direction).sum(axis=1)
    found = ((moved[0] - moved[1]) * weighing).sum(axis=1) / (2 * step)
    np.testing.assert_allclose(found, slope, rtol=1e-5, atol=1e-6)


def test_the_cost_of_overlapping_experts():
    random = np.random.default_rng(3)
    inputs, rows = random.standard_normal((TOKENS, 6)), random.standard_normal((EXPERTS, 6))
    similarity = torch.nn.functional.cosine_similarity(
        torch.tensor(inputs)[:, None], torch.tensor(rows)[None], dim=-1
    )
    unit = torch.nn.functional.normalize(torch.tensor(rows), dim=-1)
    off = torch.ones(EXPERTS, EXPERTS, dtype=torch.float64) - torch.eye(EXPERTS)
    overlaps = (unit @ unit.T * off).pow(2)
    expected = -similarity + 0.7 * similarity.abs() @ overlaps
    expected += 0.3 * torch.relu(similarity.abs() - 0.4).pow(2)
    found = osr_cost(similarity.numpy(), rows, overlap=0.7, excess=0.3, threshold=0.4)
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("eps", [0.02, 0.05, 1.0])
@pytest.mark.parametrize("steps", [0, 1, 3, 30])
def test_sinkhorn_in_logarithms(logits, eps, steps):
    cost = torch.tensor(logits) / 3.0
    scaled = (-cost / eps).clamp(-50, 50)
    for _ in range(steps):
        scaled = scaled.log_softmax(dim=1)
        scaled = scaled.log_softmax(dim=0) + torch.tensor(TOKENS / EXPERTS).double().log()
    plan = sinkhorn(cost.numpy(), eps, steps)
    np.testing.assert_allclose(plan.share, scaled.softmax(dim=1), rtol=1e-9, atol=1e-300)
    np.testing.assert_allclose(plan.clipped_share, ((cost / eps).abs() > 50).double().mean())


@pytest.mark.parametrize("steps", [0, 1, 3, 30])
def test_sinkhorn_with_guarded_divisions(logits, steps):
    share = (-torch.tensor(logits) / 0.05).clamp(-50, 50).exp()
    for _ in range(steps):
        share /= share.sum(1, keepdim=True) + 1e-8
        share /= share.sum(0, keepdim=True) + 1e-8
        share *= TOKENS / EXPERTS
    share /= share.sum(1, keepdim=True) + 1e-8
    found = sinkhorn(logits, 0.05, steps, in_logarithms=False).share
    np.testing.assert_allclose(found, share, rtol=1e-11)


def test_experts_take_the_tokens_that_torch_ranks_first(logits):
    best = torch.tensor(logits).topk(7, dim=0).indices
    expected = torch.zeros(TOKENS, EXPERTS).scatter(0, best, 1.0).bool()
    np.testing.assert_array_equal(expert_choice(logits, 7), expected)


def test_the_gate_with_a_threshold_is_a_rectified_logit(logits):
    np.testing.assert_array_equal(relu_gate(logits, 0.4), torch.relu(torch.tensor(logits) - 0.4))
