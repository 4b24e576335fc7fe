"""Rules that fade: the weights of smoothed top-k and of ReLU, and what their controllers find."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from moegeom.core.router import Weights
from moegeom.geometry.boundary.orders import extra_experts
from moegeom.geometry.selection import SCORES
from moegeom.geometry.whatif.smooth import gaps, relu_gate, smooth_gate, smoothing_budget
from moegeom.trainable import (
    ReLURouter,
    SmoothTopKRouter,
    TopKRouter,
    parameter_groups,
    update_strength,
)
from moegeom.trainable.smooth import eps_for_budget

EXPERTS, K, HIDDEN = 8, 2, 16


def router(num_experts: int = EXPERTS, **options) -> SmoothTopKRouter:
    return SmoothTopKRouter(num_experts, K, HIDDEN, **options).double()


def logits(tokens: int = 200, num_experts: int = EXPERTS) -> torch.Tensor:
    return torch.randn(tokens, num_experts, dtype=torch.float64)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("eps", [0.02, 0.3])
def test_smoothed_weights_are_those_of_numpy(score, renormalise, eps):
    module = router(eps=eps, score=score, renormalise=renormalise, bias_rate=score == "sigmoid")
    z = logits().numpy()
    scores, selection = SCORES[score](z), z
    if module.selection_bias is not None:
        module.selection_bias.normal_(std=0.2)
        selection = scores + module.selection_bias.numpy()
    ours = module.choose(torch.from_numpy(z)).dense().detach()
    weights = Weights("scores", renormalise)
    truth = smooth_gate(z, scores, selection, K, weights, module.eps.item())
    assert_allclose(ours, truth, atol=1e-6)


@pytest.mark.parametrize("extra", [0.0, 0.001, 0.5, 2.0])
def test_the_width_for_a_budget_is_that_of_numpy(extra):
    gap = gaps(logits().numpy(), K)
    ours = eps_for_budget(torch.from_numpy(gap), extra).item()
    assert_allclose(ours, smoothing_budget(gap, extra).eps, rtol=1e-12)


@pytest.mark.parametrize("eps", [0.05, 0.12, 0.16, 1.2])
def test_every_token_has_k_and_its_extra_experts(eps):
    z = logits()
    routed = router(eps=eps).choose(z)
    assert_array_equal(routed.num_chosen, K + extra_experts(z.numpy(), K, eps))
    assert routed.chosen.shape[1] == int(routed.num_chosen.max())


def test_without_width_and_at_hard_inference_the_choice_is_top_k():
    z = torch.round(logits())  # full of ties
    hard = TopKRouter(EXPERTS, K, HIDDEN).choose(z)
    zero = router(controller="exact")
    zero.held_eps.zero_()
    zero.eval()
    late = router(eps=0.5, hard_at_inference=True).eval()
    for routed in (zero.choose(z), late.choose(z)):
        assert_array_equal(routed.chosen, hard.chosen)
        assert_array_equal(routed.weights, hard.weights)


def test_the_width_has_the_gradient_of_the_budget_alone_where_the_gate_is_detached():
    for detach in (True, False):
        module = router(eps=1.5, detach_gate=detach, boundary_coef=0.0)
        z = logits().requires_grad_()
        module.choose(z).dense().square().sum().backward()
        assert z.grad.abs().max() > 0.0
        assert (module.theta.grad is None) == detach
    module = router(eps=0.3, boundary_coef=0.02)
    routed = module.choose(logits())
    over = routed.num_chosen.double().mean().item() - module.budget
    assert_allclose(routed.losses["boundary"].item(), 0.02 * 0.3 * over, rtol=1e-6)
    (slope,) = torch.autograd.grad(routed.losses["boundary"], module.theta)
    assert_allclose(slope.item(), 0.02 * over * torch.sigmoid(module.theta).item(), rtol=1e-6)


def test_the_controllers_find_the_budget_and_the_minimum_of_the_loss_is_elsewhere():
    """docs/theory.md F-12: 16 standard normal logits, k = 2, budget 2.5."""
    z = torch.from_numpy(np.random.default_rng(0).standard_normal((100_000, 16)))
    values = torch.sort(z, dim=1, descending=True).values
    gap = values[:, [1]] - values[:, 2:]
    widths = torch.linspace(0.01, 0.3, 300, dtype=torch.float64)
    mean = 2.0 + torch.searchsorted(gap.reshape(-1).sort().values, widths) / len(z)
    least = (widths * (mean - 2.5)).argmin()
    # the minimum is flat, so that a sample says less of its place than of the root
    assert_allclose([widths[least], mean[least]], [0.0794, 2.2535], atol=0.015)
    assert_allclose(eps_for_budget(gap, 0.5).item(), 0.15147, atol=0.001)

    batch = z[:4000]
    learned = router(16, boundary_coef=1.0, balance_coef=0.0)
    optimiser = torch.optim.SGD([learned.theta], lr=1.0)
    for _ in range(100):
        optimiser.zero_grad()
        routed = learned.choose(batch)
        routed.loss.backward()
        optimiser.step()
    own = eps_for_budget(gap[: len(batch)], 0.5).item()
    assert_allclose(learned.eps.item(), own, atol=0.001)
    assert_allclose(own, 0.15147, atol=0.008)
    assert_allclose(routed.num_chosen.double().mean().item(), 2.5, atol=0.002)

    exact = router(16, controller="exact")
    for part in z[:8192].split(512):
        exact.choose(part)
    assert_allclose(exact.eps.item(), 0.15147, atol=0.01)


def test_the_exact_controller_takes_its_mean_over_every_few_batches_and_rests_in_evaluation():
    module = router(controller="exact", every=3, decay=0.5, eps=0.7)
    batches = [logits() for _ in range(3)]
    needed = []
    for z in batches:
        values = torch.sort(z, dim=1, descending=True).values
        needed.append(eps_for_budget(values[:, [K - 1]] - values[:, K:], 0.5).item())
        assert_allclose(module.eps.item(), 0.7)
        module.choose(z)
    mean = needed[0]
    mean += 0.5 * (needed[1] - mean)
    mean += 0.5 * (needed[2] - mean)
    assert_allclose(module.eps.item(), mean, rtol=1e-6)
    module.eval().choose(3.0 * logits())
    assert_allclose(module.eps.item(), mean, rtol=1e-6)
    assert {name for name, _ in module.named_parameters()} == {"weight"}


def test_the_budget_is_annealed_to_top_k_and_widths_have_a_group_of_their_own_without_decay():
    module = router()
    found = []
    for epoch in (0, 40, 50, 55, 60, 79):
        module.anneal(epoch)
        found.append(module.budget)
    assert_allclose(found, [2.5, 2.5, 2.25, 2.125, 2.0, 2.0])
    model = torch.nn.ModuleList([router(), torch.nn.Linear(3, 3), router(controller="exact")])
    rest, widths = parameter_groups(model, 0.01, lr=0.1, weight_decay=0.2)
    assert widths["params"] == [model[0].theta] and widths["weight_decay"] == 0.0
    assert len(rest["params"]) == 4 and (rest["lr"], widths["lr"]) == (0.1, 0.01)
    before = model[0].theta.item()
    optimiser = torch.optim.AdamW([rest, widths])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    assert model[0].theta.item() == before


def test_weights_are_the_positive_logits_and_the_loss_their_sum_over_tokens_and_experts():
    z = torch.tensor([[0.5, -1.0, 2.0], [-1.0, -2.0, 0.0], [1.0, 1.0, 1.0]])
    routed = ReLURouter(3, 1, HIDDEN).choose(z)
    assert_array_equal(routed.chosen, [[2, 0, -1], [-1, -1, -1], [0, 1, 2]])
    assert_array_equal(routed.dense().detach(), torch.relu(z))
    assert ReLURouter(3, 1, HIDDEN).choose(-torch.ones(2, 3)).chosen.shape == (2, 0)
    z = torch.randn(300, EXPERTS, dtype=torch.float64)
    ours = ReLURouter(EXPERTS, K, HIDDEN).choose(z).dense()
    assert_allclose(ours, relu_gate(z.numpy(), 0.0), atol=1e-15)  # of NumPy
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


def test_the_strength_grows_while_too_few_weights_are_zero_and_never_sticks_at_zero():
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
    dense = ReLURouter(4, 1, HIDDEN, strength=1e-30)
    dense.choose(-torch.ones(3, 4))
    update_strength([dense])
    assert_allclose(dense.strength, 1e-30, rtol=1e-6)


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
