"""Modules that read sequences: the recurrent router, soft mixtures, merged experts, centring."""

import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn

from moegeom.geometry.space import input_pull
from moegeom.trainable import SMEAR, CentredRouter, GRURouter, ReLURouter, SoftMoE, TopKRouter

EXPERTS, K, HIDDEN, R, LENGTH = 4, 2, 6, 3, 7


def sequences(*batch: int) -> torch.Tensor:
    return torch.randn(*batch, LENGTH, HIDDEN, dtype=torch.float64)


def changed_behind(x: torch.Tensor, place: int) -> torch.Tensor:
    return torch.cat([x[..., :place, :], torch.randn_like(x[..., place:, :])], dim=-2)


def gru(**options) -> GRURouter:
    return GRURouter(EXPERTS, K, HIDDEN, router_dim=R, **options).double()


def test_logits_are_cosines_of_a_gru_cell_run_over_the_tokens():
    router = gru(temperature=0.5)
    cell = nn.GRUCell(HIDDEN, EXPERTS * R, bias=False).double()
    cell.weight_ih.data, cell.weight_hh.data = (
        router.gru.weight_ih_l0.data,
        router.gru.weight_hh_l0.data,
    )
    x = sequences(2)
    state = torch.zeros(2, EXPERTS * R, dtype=torch.float64)
    expected = []
    for t in range(LENGTH):
        state = cell(x[:, t], state)
        vectors = state.reshape(2, EXPERTS, R)
        expected.append(torch.cosine_similarity(vectors, router.weight[None], dim=2) / 0.5)
    found = router(x).logits.reshape(2, LENGTH, EXPERTS)
    assert_allclose(found.detach(), torch.stack(expected, dim=1).detach(), atol=1e-12)
    # the state starts orthogonal, and gates read by Xavier
    router = GRURouter(EXPERTS, K, 16, router_dim=R)
    for part in router.gru.weight_hh_l0.detach().chunk(3):
        assert_allclose(part @ part.T, torch.eye(EXPERTS * R), atol=1e-5)
    width = (6.0 / (16 + EXPERTS * R)) ** 0.5
    assert router.gru.weight_ih_l0.abs().max() <= width


def test_decoding_with_the_state_gives_what_the_whole_sequence_gives():
    router = gru()
    assert not router.token_local
    x = sequences(3)
    whole = router(x).logits.reshape(3, LENGTH, EXPERTS)
    state, parts = None, []
    for t in range(LENGTH):
        routed, state = router.continued(x[:, [t]], state)
        parts.append(routed.logits)
    assert_allclose(torch.stack(parts, dim=1).detach(), whole.detach(), atol=1e-12)
    # a narrow model reads its state in float32
    router = gru().bfloat16()
    x = sequences(2).bfloat16()
    logits = router(x).logits
    assert logits.dtype == torch.float32
    assert_allclose(logits.detach(), router.float()(x.float()).logits.detach(), atol=1e-6)


def experts(count: int = EXPERTS) -> list[nn.Module]:
    return [
        nn.Sequential(nn.Linear(HIDDEN, 5), nn.GELU(), nn.Linear(5, HIDDEN)).double()
        for _ in range(count)
    ]


@pytest.mark.parametrize("slots", [1, 3])
def test_a_soft_mixture_is_its_definition(slots):
    layer = SoftMoE(experts(), HIDDEN, slots=slots).double()
    x = sequences(2)
    logits = torch.einsum("blh,sh->bls", x, layer.phi)
    dispatch = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    combine = logits.exp() / logits.exp().sum(dim=2, keepdim=True)
    mixed = torch.einsum("bls,blh->bsh", dispatch, x)
    out = torch.stack(
        [layer.experts[s // slots](mixed[:, s]) for s in range(EXPERTS * slots)], dim=1
    )
    expected = torch.einsum("bls,bsh->blh", combine, out)
    assert_allclose(layer(x).detach(), expected.detach(), atol=1e-12)
    assert_allclose(layer(x[0]).detach(), expected[0].detach(), atol=1e-12)


def merged_by_hand(layer: SMEAR, share: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A two-layer expert with parameters added up in a loop."""
    first, bias, second, last = (
        sum(share[e] * list(layer.experts[e].parameters())[i] for e in range(EXPERTS))
        for i in range(4)
    )
    return nn.functional.gelu(x @ first.T + bias) @ second.T + last


@pytest.mark.parametrize("causal", [False, True])
def test_a_merged_expert_is_its_definition(causal):
    layer = SMEAR(experts(), HIDDEN, causal=causal).double()
    x = sequences(2)
    p = torch.softmax(x @ layer.weight.T, dim=2)
    for b in range(2):
        for t in range(LENGTH):
            share = p[b, : t + 1 if causal else LENGTH].mean(dim=0)
            expected = merged_by_hand(layer, share, x[b, t])
            assert_allclose(layer(x)[b, t].detach(), expected.detach(), atol=1e-12)


def test_mixtures_run_in_bfloat16_and_under_autocast():
    for layer in (
        SoftMoE(experts(), HIDDEN),
        SMEAR(experts(), HIDDEN),
        SMEAR(experts(), HIDDEN, causal=True),
    ):
        layer.float()
        x = sequences(2).float()
        exact = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_allclose(layer(x).float().detach(), exact.detach(), atol=0.05)
        narrow = layer.bfloat16()(x.bfloat16())
        assert narrow.dtype == torch.bfloat16
        assert_allclose(narrow.float().detach(), exact.detach(), atol=0.05)


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


def test_centring_wraps_routers_of_sequences_and_no_token_sees_a_later_one():
    router = CentredRouter(gru()).double()
    x = sequences(3)
    held = router.logit_bias.clone()
    first = router(x).logits
    router.logit_bias.copy_(held)
    assert not router.token_local
    other = router(changed_behind(x, 4)).logits
    parts = [logits.reshape(3, LENGTH, EXPERTS)[:, :4].detach() for logits in (first, other)]
    assert_array_equal(*parts)
