"""Top-k modules choose, weigh and lose as the routers and losses of transformers do."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import logsumexp
from scipy.stats import entropy
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter, load_balancing_loss_func

from moegeom.trainable import (
    CentredRouter,
    CosineRouter,
    OSRRouter,
    ReLURouter,
    Routed,
    SmoothTopKRouter,
    TopKRouter,
)
from moegeom.trainable.top_k import entropy_loss

EXPERTS, K, HIDDEN, TOKENS = 8, 3, 16, 50

CONFIG = {
    **dict.fromkeys(("num_experts", "num_local_experts"), EXPERTS),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "num_experts_per_tok": K,
    "hidden_size": HIDDEN,
    "routed_scaling_factor": 2.5,
}


def inputs(*batch: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(batch or (TOKENS,)), HIDDEN, dtype=dtype)


def dense_of(scores: torch.Tensor, chosen: torch.Tensor) -> np.ndarray:
    return torch.zeros(len(chosen), EXPERTS).scatter(1, chosen, scores).detach().numpy()


OF_TRANSFORMERS = {
    "olmoe": (OlmoeTopKRouter, {"renormalise": False}),
    "olmoe renormalised": (OlmoeTopKRouter, {}),
    "mixtral": (MixtralTopKRouter, {}),
    "deepseek_v3": (DeepseekV3TopkRouter, {"score": "sigmoid", "scale": 2.5, "bias_rate": 1.0}),
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_sets_and_weights_are_those_of_transformers(name):
    kind, options = OF_TRANSFORMERS[name]
    config = SimpleNamespace(**CONFIG, norm_topk_prob=options.get("renormalise", True))
    theirs, ours = kind(config), TopKRouter(EXPERTS, K, HIDDEN, **options)
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
    router = TopKRouter(EXPERTS, K, HIDDEN)
    assert_array_equal(router.choose(torch.zeros(4, EXPERTS)).chosen, [[0, 1, 2]] * 4)
    x = inputs(2, 5)
    assert_array_equal(router(x).chosen, router(x.reshape(10, HIDDEN)).chosen)
    chosen = torch.tensor([[2, 0], [1, -1], [-1, -1]])
    routed = Routed(chosen, torch.tensor([[0.7, 0.3], [1.0, 0.0], [0.0, 0.0]]), torch.zeros(3, 4))
    assert_array_equal(routed.num_chosen, [2, 1, 0])
    assert_array_equal(routed.load, [1, 1, 1, 0])
    assert_allclose(routed.dense(), [[0.3, 0, 0.7, 0], [0, 1, 0, 0], [0, 0, 0, 0]], rtol=1e-6)
    assert routed.loss.item() == 0.0


def test_the_balance_loss_is_that_of_transformers_and_others_those_of_scipy():
    router = TopKRouter(EXPERTS, K, HIDDEN, balance_coef=1.0)
    routed = router(inputs())
    theirs = load_balancing_loss_func((routed.logits,), EXPERTS, K)
    assert_allclose(routed.loss.item(), theirs.item(), rtol=1e-6)
    ours, other = (
        torch.autograd.grad(loss, router.weight, retain_graph=True)[0]
        for loss in (routed.loss, theirs)
    )
    assert_allclose(ours, other, atol=1e-7)
    routed = TopKRouter(EXPERTS, K, HIDDEN, balance_coef=0.0, z_coef=0.5)(inputs())
    expected = 0.5 * np.mean(logsumexp(routed.logits.detach().numpy(), axis=1) ** 2)
    assert list(routed.losses) == ["z"]
    assert_allclose(routed.loss.item(), expected, rtol=1e-6)
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = entropy_loss(p)
    loss.backward()
    assert_allclose(loss.item(), entropy(p.detach().numpy(), axis=1).mean(), rtol=1e-12)
    assert torch.isfinite(p.grad).all()


def test_the_bias_moves_against_the_load_until_it_is_even():
    router = TopKRouter(4, 2, HIDDEN, score="sigmoid", bias_rate=0.25)
    router.update_bias(torch.tensor([9, 5, 1, 5]))
    assert_array_equal(router.selection_bias, [-0.25, 0.0, 0.25, 0.0])
    router = TopKRouter(EXPERTS, 2, HIDDEN, score="sigmoid", bias_rate=0.003)
    x = inputs(600) + 2.0 * torch.randn(HIDDEN)
    before = router(x).load.float()
    for _ in range(300):
        router.update_bias(router(x).load)
    after = router(x).load.float()
    assert after.max() / after.mean() < 1.2 < 1.7 < before.max() / before.mean()


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_buffers_stay_float32_in_a_model_that_is_cast_to_less(cast):
    model = torch.nn.ModuleList(
        [
            TopKRouter(4, 2, HIDDEN, bias_rate=0.1),
            SmoothTopKRouter(4, 2, HIDDEN, controller="exact"),
            ReLURouter(4, 2, HIDDEN),
            OSRRouter(4, 2, HIDDEN, router_dim=2),
            CentredRouter(TopKRouter(4, 2, HIDDEN)),
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
    router = TopKRouter(EXPERTS, K, HIDDEN, jitter=0.1)
    x = inputs()
    noisy = router(x).logits
    plain = router.eval()(x).logits
    assert_array_equal(plain.detach(), router(x).logits.detach())
    ratio = (router.train().jittered(x) / x).numpy()
    assert ratio.min() >= 0.9 - 1e-6 and ratio.max() <= 1.1 + 1e-6 and ratio.std() > 0.05
    assert not torch.equal(noisy, plain)


@pytest.mark.parametrize("kind", [TopKRouter, CosineRouter])
def test_autocast_and_bfloat16_models_route_in_float32(kind):
    router = kind(EXPERTS, K, HIDDEN)
    x = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = router(x)
    assert_array_equal(inside.logits.detach(), router(x).logits.detach())
    narrow = router.bfloat16()(x.bfloat16())
    assert {t.dtype for t in (narrow.logits, narrow.weights, narrow.loss)} == {torch.float32}
    assert_array_equal(narrow.logits.detach(), router.float()(x.bfloat16()).logits.detach())


def test_cosine_logits_are_those_of_torch_and_know_no_lengths():
    router = CosineRouter(EXPERTS, K, HIDDEN, projected=5).double()
    x = inputs(dtype=torch.float64)
    projected = x @ router.projection.T
    expected = 10.0 * torch.cosine_similarity(projected[:, None], router.weight[None], dim=2)
    assert_allclose(router(x).logits.detach(), expected.detach(), atol=1e-12)
    assert_allclose(router(7.0 * x).logits.detach(), expected.detach(), atol=1e-12)
    with torch.no_grad():
        router.log_scale.fill_(50.0)
    assert_allclose(router(x).logits.detach(), 10.0 * expected.detach(), atol=1e-11)
