"""ReLU routing: every positive logit, and a loss that makes k of them on average."""

from __future__ import annotations

import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from moegeom.core.errors import UsageError
from moegeom.trainable import ReLURouter, update_strength

EXPERTS, K, HIDDEN = 8, 2, 16


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_weights_are_the_positive_logits_and_a_token_may_have_none():
    z = torch.tensor([[0.5, -1.0, 2.0], [-1.0, -2.0, 0.0], [1.0, 1.0, 1.0]])
    routed = ReLURouter(3, 1, HIDDEN).choose(z)
    assert_array_equal(routed.chosen, [[2, 0, -1], [-1, -1, -1], [0, 1, 2]])
    assert_array_equal(routed.dense().detach(), torch.relu(z))
    assert ReLURouter(3, 1, HIDDEN).choose(-torch.ones(2, 3)).chosen.shape == (2, 0)


def test_the_loss_is_the_sum_over_tokens_and_experts():
    router = ReLURouter(EXPERTS, K, HIDDEN, num_layers=3, strength=0.5)
    z = torch.randn(20, EXPERTS, requires_grad=True)
    total = torch.zeros(())
    for e in range(EXPERTS):
        f = EXPERTS / (K * 20) * sum(1 for t in range(20) if z[t, e] > 0)
        for t in range(20):
            total = total + f * torch.relu(z[t, e])
    expected = 0.5 / (3 * 20) * total
    ours = router.choose(z).loss
    assert_allclose(ours.item(), expected.item(), rtol=1e-6)
    slopes = [torch.autograd.grad(loss, z)[0] for loss in (ours, expected)]
    assert_allclose(*slopes, rtol=1e-5, atol=1e-9)


def test_the_strength_grows_while_too_few_weights_are_zero_and_falls_after():
    first, second = (ReLURouter(4, 1, HIDDEN, strength=1e-3) for _ in range(2))
    first.choose(torch.tensor([[1.0, 1.0, -1.0, -1.0]]))
    second.choose(torch.tensor([[1.0, -1.0, -1.0, -1.0]]))
    assert update_strength([first, second]) == 0.625
    assert_allclose([first.strength, second.strength], 1.2e-3, rtol=1e-6)
    first.choose(torch.tensor([[-1.0, -1.0, -1.0, -1.0]]))
    update_strength([first, second])
    assert_allclose(first.strength, 1e-3, rtol=1e-6)
    first.choose(torch.tensor([[1.0, 1.0, -1.0, -1.0]]))
    second.choose(torch.tensor([[-1.0, -1.0, -1.0, -1.0]]))
    assert update_strength([first, second]) == 0.75
    assert_allclose(first.strength, 1e-3, rtol=1e-6)


def test_training_ends_with_k_experts_on_average():
    router = ReLURouter(EXPERTS, K, HIDDEN, has_bias=True, strength=0.01, factor=1.02)
    optimiser = torch.optim.Adam(router.parameters(), lr=0.01)
    target = torch.randn(HIDDEN, EXPERTS)
    counts = []
    for _ in range(400):
        x = torch.randn(128, HIDDEN)
        routed = router(x)
        loss = (routed.dense() - torch.relu(x @ target)).square().mean() + routed.loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        update_strength([router])
        counts.append(routed.num_chosen.float().mean().item())
    assert counts[0] > 3.0
    assert_allclose(sum(counts[-50:]) / 50, K, atol=0.5)


def test_gradients_are_finite_differences_away_from_zero():
    router = ReLURouter(4, K, HIDDEN, strength=0.3).double()
    z = torch.randn(5, 4, dtype=torch.float64)
    z = (z + 0.2 * z.sign()).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: (router.choose(z).dense(), router.choose(z).loss), z)


def test_a_strength_never_sticks_at_zero():
    dense = ReLURouter(4, 1, HIDDEN, strength=1e-30)
    dense.choose(-torch.ones(3, 4))
    update_strength([dense])
    assert_allclose(dense.strength, 1e-30, rtol=1e-6)
    with pytest.raises(UsageError, match="no batch was routed"):
        update_strength([ReLURouter(4, 1, HIDDEN)])
    small = ReLURouter(4, 1, HIDDEN)
    small(torch.randn(3, HIDDEN))
    small.strength = small.strength.half()
    with pytest.raises(UsageError, match="a strength is 0 in torch.float16"):
        update_strength([small])
    with pytest.raises(UsageError, match="expected a layer, a positive strength"):
        ReLURouter(4, 1, HIDDEN, strength=0.0)
