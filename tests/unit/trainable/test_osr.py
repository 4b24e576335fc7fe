"""Sinkhorn routing: plans, what is causal, what the cost cannot do, and orthonormal rows."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from scipy.linalg import polar

from moegeom.geometry.whatif.batches import osr_cost
from moegeom.geometry.whatif.batches import sinkhorn as numpy_plan
from moegeom.trainable import ExpressionProjector, OSRRouter
from moegeom.trainable.expression import newton_schulz, orthonormal_rows, steps_for_start
from moegeom.trainable.osr import repulsive_cost, sinkhorn

EXPERTS, K, HIDDEN, R = 6, 2, 32, 5


def router(**options) -> OSRRouter:
    return OSRRouter(EXPERTS, K, HIDDEN, router_dim=R, **options)


@pytest.mark.parametrize("steps", [0, 1, 3, 40])
def test_costs_and_plans_are_those_of_numpy(steps):
    """The definitions in float64, which what-if routers are computed with."""
    random = np.random.default_rng(0)
    similarity = np.tanh(random.standard_normal((300, EXPERTS)))
    rows = random.standard_normal((EXPERTS, HIDDEN))
    cost = osr_cost(similarity, rows, 0.5, 0.5, 0.7)
    ours = repulsive_cost(torch.from_numpy(similarity), torch.from_numpy(rows), 0.5, 0.5, 0.7)
    assert_allclose(ours, cost, atol=1e-12)
    plan = sinkhorn((-ours / 0.05).clamp(-50.0, 50.0), steps)
    assert_allclose(plan, numpy_plan(cost, 0.05, steps).share, atol=1e-6)


def test_identical_experts_have_identical_gradients_from_the_cost():
    """docs/theory.md F-30: what is equal stays equal, so that no theorem of separation holds."""
    y, unit = torch.randn(40, R, dtype=torch.float64), torch.nn.functional.normalize
    for weigh in (torch.ones_like, lambda cost: sinkhorn(-cost / 0.05, 3)):
        rows = torch.randn(4, R, dtype=torch.float64)
        rows[1] = rows[0]
        rows.requires_grad_()
        cost = repulsive_cost(unit(y, dim=1) @ unit(rows, dim=1).T, rows, 0.5, 0.5, 0.7)
        (cost * weigh(cost)).sum().backward()
        assert_allclose(rows.grad[0], rows.grad[1], rtol=1e-9, atol=1e-12)
        assert (rows.grad[0] - rows.grad[2]).abs().max() > 1e-3


def test_in_training_tokens_see_each_other_and_in_evaluation_later_ones_change_nothing():
    module = router()
    x = torch.randn(120, HIDDEN) + 2.0 * torch.randn(HIDDEN)
    assert not module.token_local
    even = module(x).load.float()
    causal = module.eval()(x).load.float()
    assert even.max() / even.mean() < causal.max() / causal.mean()
    logits = 3.0 * torch.randn(2, EXPERTS).repeat_interleave(20, dim=0)
    changed = torch.cat([logits[:20], -logits[20:]])
    module.train()
    before, after = module.choose(logits).weights, module.choose(changed).weights
    assert (before[:20] - after[:20]).abs().max() > 1e-3
    module(torch.randn(64, HIDDEN))
    module.eval()
    x = torch.randn(20, HIDDEN)
    other = torch.cat([x[:7], torch.randn(13, HIDDEN)])
    assert module.token_local
    assert_array_equal(module(x).weights[:7].detach(), module(other).weights[:7].detach())
    alone = module(x[:1])
    assert alone.weights.detach().std() > 1e-3
    balanced = router(balanced_at_inference=True).eval()
    assert_allclose(balanced(x[:1]).weights.detach(), 0.5)


def test_what_experts_are_like_comes_from_earlier_batches():
    module = router(decay=0.75)
    first, second = torch.randn(2, 50, HIDDEN)
    module(first)
    mean = 0.25 * module.projector(first).mean(dim=0).reshape(EXPERTS, R)
    assert_allclose(module.expression_mean, mean.detach(), atol=1e-6)
    held = module.expression_mean.clone()
    logits = module(second).logits
    module.expression_mean.copy_(held)
    half = module(second[:25]).logits
    assert_allclose(logits[:25].detach(), half.detach(), atol=1e-4)


def test_losses_are_those_of_projector_and_plan():
    module = router(entropy_coef=0.5, ortho_coef=0.25)
    with torch.no_grad():
        module.projector.weight.mul_(2.0)
    losses = module(torch.randn(9, HIDDEN)).losses
    # rows of length 2: the Gram matrix is 4 I
    assert_allclose(losses["ortho"].item(), 0.25 * 9.0 * EXPERTS * R, rtol=1e-5)
    assert 0.0 < losses["entropy"].item() <= 0.5 * torch.tensor(float(EXPERTS)).log().item()


def test_ten_steps_make_eight_rows_of_32_orthonormal_and_end_at_the_nearest_such_matrix():
    """Five do not."""
    matrix = torch.randn(8, 32, dtype=torch.float64)
    start = matrix / torch.linalg.matrix_norm(matrix)
    step = 1.5 * start - 0.5 * start @ start.T @ start
    assert_allclose(newton_schulz(matrix, 1), step, rtol=1e-14)
    errors = [
        torch.linalg.matrix_norm(x @ x.T - torch.eye(8, dtype=torch.float64), ord=2).item()
        for x in (newton_schulz(matrix, 5), newton_schulz(matrix, 10))
    ]
    assert errors[1] < 2e-15 < 1e-3 < errors[0]
    assert_allclose(newton_schulz(matrix, 20), polar(matrix.numpy())[0], atol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 30, 64])
def test_rows_of_any_start_are_orthonormal_even_square_ones(rows):
    x = orthonormal_rows(torch.randn(rows, 64, dtype=torch.float64))
    assert_allclose(x @ x.T, torch.eye(rows), atol=1e-11)
    again = newton_schulz(x, steps_for_start(rows))
    assert_allclose(again @ again.T, torch.eye(rows), atol=1e-14)


def test_rows_that_are_always_orthonormal_and_the_loss_of_the_others_have_their_gradient():
    projector = ExpressionProjector(16, 6, keep="always")
    x = torch.randn(10, 16)
    projector(x).square().mul(torch.arange(6.0)).sum().backward()
    with torch.no_grad():
        projector.weight -= 0.3 * projector.weight.grad / projector.weight.grad.norm()
    rows = projector.rows().detach()
    assert_allclose(rows @ rows.T, torch.eye(6), atol=1e-5)
    assert (projector.weight @ projector.weight.T - torch.eye(6)).abs().max() > 0.01
    projector = ExpressionProjector(7, 4).double()
    torch.nn.init.normal_(projector.weight)
    projector.loss().backward()
    w = projector.weight.detach()
    assert_allclose(projector.weight.grad, 4.0 * (w @ w.T - torch.eye(4)) @ w, rtol=1e-12)
