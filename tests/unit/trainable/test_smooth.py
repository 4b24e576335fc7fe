"""Smoothed top-k: the weights of the definition, the budget, and what each controller finds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from moegeom.core.errors import UsageError
from moegeom.geometry.boundary.orders import extra_experts
from moegeom.trainable import SmoothTopKRouter, TopKRouter, parameter_groups
from moegeom.trainable.smooth import eps_for_budget, smooth_step

EXPERTS, K, HIDDEN = 8, 2, 16

FIXTURES = {
    entry["name"]: entry
    for entry in json.loads(
        (Path(__file__).parents[2] / "data/theory_fixtures.json").read_text("utf-8")
    )["fixtures"]
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def router(num_experts: int = EXPERTS, **options) -> SmoothTopKRouter:
    return SmoothTopKRouter(num_experts, K, HIDDEN, **options).double()


def logits(tokens: int = 200, num_experts: int = EXPERTS) -> torch.Tensor:
    return torch.randn(tokens, num_experts, dtype=torch.float64)


def test_the_step_is_that_of_the_notes():
    fixture = FIXTURES["smoothstep"]
    u = torch.tensor(fixture["inputs"]["u"], dtype=torch.float64)
    assert_allclose(smooth_step(u, 1.0, 50.0), fixture["expected"], rtol=1e-9, atol=1e-12)


def test_the_weights_are_those_of_the_notes():
    fixture = FIXTURES["smooth_gate"]
    module = router(5, eps=fixture["inputs"]["eps"])
    routed = module.choose(torch.tensor([fixture["inputs"]["z"]], dtype=torch.float64))
    assert_allclose(routed.dense()[0].detach(), fixture["expected"], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("eps", [0.05, 0.12, 0.16, 1.2])
def test_every_token_has_k_and_its_extra_experts(eps):
    z = logits()
    routed = router(eps=eps).choose(z)
    assert_array_equal(routed.num_chosen, K + extra_experts(z.numpy(), K, eps))
    assert routed.chosen.shape[1] == int(routed.num_chosen.max())


@pytest.mark.parametrize(
    "options",
    [{"score": "softmax"}, {"renormalise": False}, {"score": "sigmoid", "bias_rate": 1.0}],
)
def test_far_from_ties_the_weights_are_those_of_top_k(options):
    smooth, hard = router(eps=1e-9, **options), TopKRouter(EXPERTS, K, HIDDEN, **options)
    z = logits()
    assert_array_equal(smooth.choose(z).dense().detach(), hard.double().choose(z).dense().detach())


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


def test_weights_jump_at_a_tie_with_top_k_and_not_with_smoothing():
    z = torch.tensor([[1.0, 0.5, 0.5, -1.0]], dtype=torch.float64)
    step = torch.tensor([[0.0, 1e-7, -1e-7, 0.0]], dtype=torch.float64)

    def jump(module) -> float:
        return (
            (module.choose(z + step).dense() - module.choose(z - step).dense()).abs().max().item()
        )

    assert jump(TopKRouter(4, K, HIDDEN)) > 0.3
    assert jump(router(4, eps=0.1)) < 1e-6


@pytest.mark.parametrize("eps", [0.1, 1.0])
def test_weights_change_no_faster_than_the_steepest_place_of_the_step(eps):
    module = router(eps=eps)
    start, direction = logits(2000), logits(2000).sign()
    size = 1e-6
    change = (
        (module.choose(start + size * direction).dense() - module.choose(start).dense()).abs().max()
    )
    # 17.756 / eps times the two logits that u is made of, and the softmax itself
    assert change.item() / size < 2 * 17.756 / eps + 1.0


def test_gradients_of_weights_and_width_are_finite_differences():
    module = router(eps=0.8, renormalise=True, balance_coef=0.0, boundary_coef=0.0)
    z = torch.tensor(
        [[1.0, 0.4, 0.36 - 0.72, -2.0], [2.0, 0.9, 0.9 - 0.77, 0.9 - 0.75]], dtype=torch.float64
    )

    def weights(z: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        small = SmoothTopKRouter(4, K, HIDDEN, boundary_coef=0.0).double()
        del small.theta
        small.theta = theta
        return small.choose(z).dense()

    theta = module.theta.detach().requires_grad_()
    assert torch.autograd.gradcheck(weights, (z.requires_grad_(), theta))


def test_a_detached_gate_gives_the_width_no_gradient_but_that_of_the_budget():
    for detach in (True, False):
        module = router(eps=1.5, detach_gate=detach, boundary_coef=0.0)
        z = logits().requires_grad_()
        module.choose(z).dense().square().sum().backward()
        assert z.grad.abs().max() > 0.0
        assert (module.theta.grad is None) == detach


def test_the_boundary_loss_pulls_by_the_distance_from_the_budget():
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


def test_the_width_of_the_notes_meets_the_budget():
    fixture = FIXTURES["eps_for_budget"]
    gaps = torch.tensor(fixture["inputs"]["gaps"], dtype=torch.float64)
    assert_allclose(eps_for_budget(gaps, 0.5).item(), fixture["expected"], rtol=1e-12)
    assert eps_for_budget(gaps, 0.0).item() == 0.0
    assert gaps.max() < eps_for_budget(gaps, 2.0).item() < gaps.max() + 1e-9


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


def test_the_budget_is_annealed_to_top_k():
    module = router()
    found = []
    for epoch in (0, 40, 50, 55, 60, 79):
        module.anneal(epoch)
        found.append(module.budget)
    assert_allclose(found, [2.5, 2.5, 2.25, 2.125, 2.0, 2.0])


def test_the_widths_have_a_group_of_their_own_without_decay():
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 1.5}, "budget is 1.5, expected 2 to 8"),
        ({"controller": "none"}, "controller is 'none', expected loss or exact"),
        ({"eps": 0.0}, "expected positive numbers"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        router(**options)
