"""Top-k and rules that fade: as NumPy, torch and transformers have them; what
their controllers find; centring.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from scipy.signal import lfilter
from scipy.special import logsumexp
from scipy.stats import entropy, kstest, norm
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter, load_balancing_loss_func

from moegeom import trainable
from moegeom.core.router import Weights
from moegeom.geometry.selection import SCORES
from moegeom.geometry.space import input_pull
from moegeom.geometry.whatif import gaps, relu_gate, smooth_gate, smoothing_budget
from moegeom.trainable import CentredRouter, ReLURouter, TopKRouter
from moegeom.trainable.continuous import eps_for_budget
from moegeom.trainable.top_k import entropy_loss
from tests.oracle.helpers import extra_experts

EXPERTS, K, HIDDEN = 8, 2, 16


def router(num_experts: int = EXPERTS, **options) -> trainable.SmoothTopKRouter:
    return trainable.SmoothTopKRouter(num_experts, K, HIDDEN, **options).double()


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
    hard = trainable.TopKRouter(EXPERTS, K, HIDDEN).choose(z)
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
    rest, widths = trainable.parameter_groups(model, 0.01, lr=0.1, weight_decay=0.2)
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
    routed = trainable.ReLURouter(3, 1, HIDDEN).choose(z)
    assert_array_equal(routed.chosen, [[2, 0, -1], [-1, -1, -1], [0, 1, 2]])
    assert_array_equal(routed.dense().detach(), torch.relu(z))
    assert trainable.ReLURouter(3, 1, HIDDEN).choose(-torch.ones(2, 3)).chosen.shape == (2, 0)
    z = torch.randn(300, EXPERTS, dtype=torch.float64)
    ours = trainable.ReLURouter(EXPERTS, K, HIDDEN).choose(z).dense()
    assert_allclose(ours, relu_gate(z.numpy(), 0.0), atol=1e-15)  # of NumPy
    router = trainable.ReLURouter(EXPERTS, K, HIDDEN, num_layers=3, strength=0.5)
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
    first, second = (trainable.ReLURouter(4, 1, HIDDEN, strength=1e-3) for _ in range(2))
    first.choose(torch.tensor([[1.0, 1.0, -1.0, -1.0]]))
    second.choose(torch.tensor([[1.0, -1.0, -1.0, -1.0]]))
    assert trainable.update_strength([first, second]) == 0.625
    assert_allclose([first.strength, second.strength], 1.2e-3, rtol=1e-6)
    first.choose(torch.tensor([[-1.0, -1.0, -1.0, -1.0]]))
    trainable.update_strength([first, second])
    assert_allclose(first.strength, 1e-3, rtol=1e-6)
    first.choose(torch.tensor([[1.0, 1.0, -1.0, -1.0]]))
    second.choose(torch.tensor([[-1.0, -1.0, -1.0, -1.0]]))
    assert trainable.update_strength([first, second]) == 0.75
    assert_allclose(first.strength, 1e-3, rtol=1e-6)
    dense = trainable.ReLURouter(4, 1, HIDDEN, strength=1e-30)
    dense.choose(-torch.ones(3, 4))
    trainable.update_strength([dense])
    assert_allclose(dense.strength, 1e-30, rtol=1e-6)


def test_training_ends_with_k_experts_on_average():
    router = trainable.ReLURouter(EXPERTS, K, HIDDEN, has_bias=True, strength=0.01, factor=1.02)
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
        trainable.update_strength([router])
        counts.append(routed.num_chosen.float().mean().item())
    assert counts[0] > 3.0
    assert_allclose(sum(counts[-50:]) / 50, K, atol=0.5)


# -------------------------------------------------------------------------------------------- top k
TOP_EXPERTS, TOP_K, TOP_HIDDEN, TOKENS = 8, 3, 16, 50

CONFIG = {
    **dict.fromkeys(("num_experts", "num_local_experts"), TOP_EXPERTS),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "num_experts_per_tok": TOP_K,
    "hidden_size": TOP_HIDDEN,
    "routed_scaling_factor": 2.5,
}


def inputs(*batch: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(batch or (TOKENS,)), TOP_HIDDEN, dtype=dtype)


def dense_of(scores: torch.Tensor, chosen: torch.Tensor) -> np.ndarray:
    return torch.zeros(len(chosen), TOP_EXPERTS).scatter(1, chosen, scores).detach().numpy()


OF_TRANSFORMERS = {
    "olmoe": (OlmoeTopKRouter, {"renormalise": False}),
    "olmoe renormalised": (OlmoeTopKRouter, {}),
    "mixtral": (MixtralTopKRouter, {}),
    "deepseek_v3": (DeepseekV3TopkRouter, {"score": "sigmoid", "scale": 2.5, "bias_rate": 1.0}),
}


@pytest.mark.parametrize(("kind", "options"), OF_TRANSFORMERS.values(), ids=OF_TRANSFORMERS)
def test_sets_and_weights_are_those_of_transformers(kind, options):
    config = SimpleNamespace(**CONFIG, norm_topk_prob=options.get("renormalise", True))
    theirs, ours = kind(config), trainable.TopKRouter(TOP_EXPERTS, TOP_K, TOP_HIDDEN, **options)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
        if ours.selection_bias is not None:
            ours.selection_bias.normal_(std=0.3)
            theirs.e_score_correction_bias.copy_(ours.selection_bias)
    x = inputs()
    _, scores, chosen = theirs(x)
    routed = ours(x)
    assert_allclose(routed.dense().detach(), dense_of(scores, chosen), atol=1e-6)


def test_equal_logits_choose_the_lower_number_and_the_record_adds_up_in_order():
    router = trainable.TopKRouter(TOP_EXPERTS, TOP_K, TOP_HIDDEN)
    assert_array_equal(router.choose(torch.zeros(4, TOP_EXPERTS)).chosen, [[0, 1, 2]] * 4)
    x = inputs(2, 5)
    assert_array_equal(router(x).chosen, router(x.reshape(10, TOP_HIDDEN)).chosen)
    chosen = torch.tensor([[2, 0], [1, -1], [-1, -1]])
    routed = trainable.Routed(
        chosen, torch.tensor([[0.7, 0.3], [1.0, 0.0], [0.0, 0.0]]), torch.zeros(3, 4)
    )
    assert_array_equal(routed.num_chosen, [2, 1, 0])
    assert_array_equal(routed.load, [1, 1, 1, 0])
    assert_allclose(routed.dense(), [[0.3, 0, 0.7, 0], [0, 1, 0, 0], [0, 0, 0, 0]], rtol=1e-6)
    assert routed.loss.item() == 0.0


def test_the_balance_loss_is_that_of_transformers_and_others_those_of_scipy():
    router = trainable.TopKRouter(TOP_EXPERTS, TOP_K, TOP_HIDDEN, balance_coef=1.0)
    routed = router(inputs())
    theirs = load_balancing_loss_func((routed.logits,), TOP_EXPERTS, TOP_K)
    assert_allclose(routed.loss.item(), theirs.item(), rtol=1e-6)
    ours, other = (
        torch.autograd.grad(loss, router.weight, retain_graph=True)[0]
        for loss in (routed.loss, theirs)
    )
    assert_allclose(ours, other, atol=1e-7)
    routed = trainable.TopKRouter(TOP_EXPERTS, TOP_K, TOP_HIDDEN, balance_coef=0.0, z_coef=0.5)(
        inputs()
    )
    expected = 0.5 * np.mean(logsumexp(routed.logits.detach().numpy(), axis=1) ** 2)
    assert list(routed.losses) == ["z"]
    assert_allclose(routed.loss.item(), expected, rtol=1e-6)
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = entropy_loss(p)
    loss.backward()
    assert_allclose(loss.item(), entropy(p.detach().numpy(), axis=1).mean(), rtol=1e-12)
    assert torch.isfinite(p.grad).all()


def test_the_bias_moves_against_the_load_until_it_is_even():
    router = trainable.TopKRouter(4, 2, TOP_HIDDEN, score="sigmoid", bias_rate=0.25)
    router.update_bias(torch.tensor([9, 5, 1, 5]))
    assert_array_equal(router.selection_bias, [-0.25, 0.0, 0.25, 0.0])
    router = trainable.TopKRouter(TOP_EXPERTS, 2, TOP_HIDDEN, score="sigmoid", bias_rate=0.003)
    x = inputs(600) + 2.0 * torch.randn(TOP_HIDDEN)
    before = router(x).load.float()
    for _ in range(300):
        router.update_bias(router(x).load)
    after = router(x).load.float()
    assert after.max() / after.mean() < 1.2 < 1.7 < before.max() / before.mean()


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_buffers_stay_float32_in_a_model_that_is_cast_to_less(cast):
    model = torch.nn.ModuleList(
        [
            trainable.TopKRouter(4, 2, TOP_HIDDEN, bias_rate=0.1),
            trainable.SmoothTopKRouter(4, 2, TOP_HIDDEN, controller="exact"),
            trainable.ReLURouter(4, 2, TOP_HIDDEN),
            trainable.CentredRouter(trainable.TopKRouter(4, 2, TOP_HIDDEN)),
        ]
    )
    held = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(cast)
    assert {parameter.dtype for parameter in model.parameters()} == {cast}
    for name, buffer in model.named_buffers():
        assert not buffer.is_floating_point() or buffer.dtype == torch.float32
        assert_array_equal(buffer, held[name])
    for router in model:
        router(inputs(dtype=cast))
    assert model.double()[1].held_eps.dtype == torch.float64


def test_jitter_is_of_training_alone():
    router = trainable.TopKRouter(TOP_EXPERTS, TOP_K, TOP_HIDDEN, jitter=0.1)
    x = inputs()
    noisy = router(x).logits
    plain = router.eval()(x).logits
    assert_array_equal(plain.detach(), router(x).logits.detach())
    ratio = (router.train().jittered(x) / x).numpy()
    assert ratio.min() >= 0.9 - 1e-6 and ratio.max() <= 1.1 + 1e-6 and ratio.std() > 0.05
    assert not torch.equal(noisy, plain)


@pytest.mark.parametrize("kind", [trainable.TopKRouter, trainable.CosineRouter])
def test_autocast_and_bfloat16_models_route_in_float32(kind):
    router = kind(TOP_EXPERTS, TOP_K, TOP_HIDDEN)
    x = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = router(x)
    assert_array_equal(inside.logits.detach(), router(x).logits.detach())
    narrow = router.bfloat16()(x.bfloat16())
    assert {t.dtype for t in (narrow.logits, narrow.weights, narrow.loss)} == {torch.float32}
    assert_array_equal(narrow.logits.detach(), router.float()(x.bfloat16()).logits.detach())


def test_cosine_logits_are_those_of_torch_and_know_no_lengths():
    router = trainable.CosineRouter(TOP_EXPERTS, TOP_K, TOP_HIDDEN, projected=5).double()
    x = inputs(dtype=torch.float64)
    projected = x @ router.projection.T
    expected = 10.0 * torch.cosine_similarity(projected[:, None], router.weight[None], dim=2)
    assert_allclose(router(x).logits.detach(), expected.detach(), atol=1e-12)
    assert_allclose(router(7.0 * x).logits.detach(), expected.detach(), atol=1e-12)
    with torch.no_grad():
        router.log_scale.fill_(50.0)
    assert_allclose(router(x).logits.detach(), 10.0 * expected.detach(), atol=1e-11)


def test_smoothed_cosines_are_those_of_torch_smoothed_by_numpy():
    router = trainable.SmoothCosineRouter(
        TOP_EXPERTS, TOP_K, TOP_HIDDEN, projected=5, eps=1.5
    ).double()
    x = inputs(dtype=torch.float64)
    projected = x @ router.projection.T
    z = 10.0 * torch.cosine_similarity(projected[:, None], router.weight[None], dim=2)
    z = z.detach().numpy()
    weights = smooth_gate(z, SCORES["softmax"](z), z, TOP_K, Weights("scores", True), 1.5)
    routed = router(x)
    assert_allclose(routed.dense().detach(), weights, atol=1e-6)
    assert routed.num_chosen.double().mean() > TOP_K


@pytest.mark.parametrize("kind", [trainable.TopKRouter, trainable.CosineRouter])
def test_gate_noise_is_normal_of_its_deviation_over_the_experts_and_of_training_alone(kind):
    router = kind(TOP_EXPERTS, TOP_K, TOP_HIDDEN, gate_noise=2.0).double()
    x = inputs(dtype=torch.float64)
    noisy, plain = router(x).logits, router.eval()(x).logits
    assert_array_equal(plain.detach(), router(x).logits.detach())
    noise = (noisy - plain).detach().numpy().ravel()
    assert kstest(noise, norm(scale=2.0 / TOP_EXPERTS).cdf).pvalue > 0.001
    assert kstest(noise, norm(scale=2.0).cdf).pvalue < 0.001


def test_a_bias_follows_the_running_mean_of_loads_that_it_is_given():
    router = trainable.TopKRouter(3, 1, 4, bias_rate=0.5)
    loads = np.array([[6.0, 2.0, 1.0], [0.0, 8.0, 1.0], [0.0, 1.0, 8.0], [9.0, 0.0, 0.0]])
    means = lfilter([0.1], [1.0, -0.9], loads, axis=0)  # S3 D.2 has 0.99
    running = torch.zeros(3)
    for load in loads:
        router.update_bias(running.lerp_(torch.from_numpy(load).float(), 0.1))
    expected = 0.5 * np.sign(means.mean(axis=1, keepdims=True) - means).sum(axis=0)
    assert_allclose(router.selection_bias, expected)


def test_defaults_are_the_published_settings():
    """S0 appendix C (a, b, budget, weight of the balance)."""
    published = {"a": 1.0, "b": 50.0, "budget": K + 0.5, "balance_coef": 0.01}
    assert {name: getattr(router(), name) for name in published} == published


# ---------------------------------------------------------------------------------------- sequences
LENGTH = 7


def sequences(*batch: int) -> torch.Tensor:
    return torch.randn(*batch, LENGTH, HIDDEN, dtype=torch.float64)


def test_the_bias_is_minus_the_running_mean_of_the_logits():
    router = CentredRouter(TopKRouter(EXPERTS, K, HIDDEN), decay=0.8).double()
    mean = torch.zeros(EXPERTS, dtype=torch.float64)
    for step in range(1, 9):
        x = sequences(4) + 1.0
        logits = router.router(x).logits
        assert_allclose(
            router(x).logits.detach(), (logits - (mean - mean.mean())).detach(), atol=1e-12
        )
        mean += max(0.2, 1.0 / step) * (logits.detach().mean(dim=0) - mean)
    router.eval()(5.0 * sequences(4))
    assert_allclose(router.logit_bias, mean.mean() - mean, atol=1e-12)
    assert_allclose(router.logit_bias.sum(), 0.0, atol=1e-12)


@pytest.mark.parametrize("kind", [TopKRouter, ReLURouter])
def test_centred_routers_are_not_pulled_by_the_mean_input(kind):
    router = CentredRouter(kind(16, K, HIDDEN)).double()
    x = torch.randn(4000, HIDDEN, dtype=torch.float64) + 3.0
    assert input_pull(router(x).logits.detach().numpy()) > 1.0
    assert input_pull(router.eval()(x).logits.detach().numpy()) < 1e-9
