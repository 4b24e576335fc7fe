"""Models that are trained beside each other: what they share, and what transformers makes of one."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.trained.evaluation import (
    affine_router,
    choice_figures,
    evaluate,
    flipped_share,
    gram_z,
    jump_over_output,
    recorded,
)
from benchmarks.trained.export import as_olmoe
from benchmarks.trained.methods import METHODS
from benchmarks.trained.model import is_of_router
from benchmarks.trained.settings import Settings
from benchmarks.trained.text import HeldOut, batches
from benchmarks.trained.training import build, routers_of, train

TINY = Settings(
    name="tiny",
    hidden=16,
    layers=2,
    heads=2,
    experts=4,
    top_k=2,
    width=8,
    length=24,
    sequences_per_domain=1,
    steps=3,
    seeds=1,
    renormalise=True,
    held_out_per_domain=2,
    router_dimension=4,
)


@pytest.fixture(scope="module")
def text():
    tokens = next(batches(TINY, 7))
    return HeldOut(tokens, tokens.flip(0), 0.0, 1)


def stirred(method, settings=TINY, seed=0):
    """An untrained model whose routers and experts differ enough to be told apart."""
    model = build(METHODS[method], settings, seed)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def test_the_same_seed_gives_the_same_bytes():
    first, second = (train(METHODS["smooth"], TINY, 0)[0] for _ in range(2))
    for run in (first, second):
        run |= {"seconds": 0.0, "figures": run["figures"] | {"ms_per_step": 0.0}}
    assert first == second
    assert train(METHODS["smooth"], TINY, 1)[0]["curves"] != first["curves"]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "top-k"])
def test_methods_share_every_initial_value_that_has_a_name_and_a_shape_in_common(method):
    base, other = (dict(build(METHODS[m], TINY, 3).named_parameters()) for m in ("top-k", method))
    shared = [n for n in base if n in other and base[n].shape == other[n].shape]
    assert {"embed_tokens.weight", "layers.1.self_attn.q_proj.weight"} <= set(shared)
    for name in shared:
        if not is_of_router(name) or method.startswith(("smooth", "relu")):
            assert_array_equal(base[name].detach(), other[name].detach(), err_msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_every_weight_and_is_evaluated(method, text):
    model = build(METHODS[method], TINY, 0)
    tokens = text.tokens
    logits, done = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    (loss + sum(routed.loss for routed in done)).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    for evaluated in (METHODS[method], *METHODS[method].also):
        evaluated.prepare(routers_of(model))
        figures = evaluate(model, text, evaluated, TINY)
        assert all(math.isfinite(value) for value in figures.values()), figures
        assert figures["bits"] > 0.0


@pytest.mark.parametrize("renormalise", [False, True])
def test_bits_per_byte_are_the_loss_of_transformers(renormalise, text):
    settings = dataclasses.replace(TINY, renormalise=renormalise)
    model = stirred("top-k", settings)
    figures = evaluate(model, text, METHODS["top-k"], settings)
    exported = as_olmoe(model, settings)
    with torch.no_grad():
        loss = exported(input_ids=text.tokens, labels=text.tokens).loss.item()
    assert_allclose(figures["bits"] * math.log(2.0), loss, rtol=1e-5)


def test_what_olmoe_has_not_is_not_exported():
    with pytest.raises(ValueError, match="shared"):
        as_olmoe(build(METHODS["top-k"], TINY, 0), dataclasses.replace(TINY, shared=1))


def test_widths_count_shared_experts_dense_layers_and_the_experts_that_a_block_stands_for(text):
    widths = {
        name: evaluate(build(METHODS[name], TINY, 0), text, METHODS[name], TINY)["active_width"]
        for name in ("dense-active", "dense-total", "top-k", "smear")
    }
    assert widths == {"dense-active": 16.0, "dense-total": 32.0, "top-k": 16.0, "smear": 16.0}
    method = METHODS["top-k"]
    shared = dataclasses.replace(TINY, shared=1)
    assert evaluate(build(method, shared, 0), text, method, shared)["active_width"] == 24.0
    dense = dataclasses.replace(TINY, first_dense=2)
    figures = evaluate(build(method, dense, 0), text, method, dense)
    assert figures["active_width"] == 16.0
    assert "max_vio" not in figures


def test_costs_and_temperatures_are_those_of_the_settings():
    macs = {n: build(METHODS[n], TINY, 0).layers[0].mlp.router_macs(24) for n in METHODS}
    assert macs["dense-active"] == 0
    assert macs["top-k"] == macs["smooth"] == macs["relu"] == macs["centred"] == 4 * 16
    # a projection to 4 numbers, and 4 rows there
    assert macs["cosine"] == 4 * 16 + 4 * 4
    # 2 merged experts of width 16, 3 matrices each, and 2 rows of logits
    assert macs["smear"] == 2 * 3 * 16 * 16 + 2 * 16
    hot = dataclasses.replace(TINY, temperature=4.0)
    plain, heated = stirred("top-k"), stirred("top-k", hot)
    inputs = torch.randn(5, 3, TINY.hidden, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        first = plain.layers[0].mlp(inputs)[1].logits
        second = heated.layers[0].mlp(inputs)[1].logits
    assert_allclose(second, first / 4.0, rtol=1e-6)


def test_figures_of_choices_are_those_of_counting():
    chosen = np.array([[0, 1], [1, 0], [2, -1], [0, 1]])
    found = choice_figures(chosen, 4)
    # three of seven slots for experts 0 and 1 each; fair are 7 / 4
    assert_allclose(found["max_vio"], 3 / (7 / 4) - 1)
    assert found["experts_per_token"] == 7 / 4
    # sets {0, 1} three times and {2} once: plug-in entropy and the correction 1 / (2 T)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) + 1 / 8
    assert_allclose(found["effective_sets"], math.exp(entropy))


def test_the_jump_is_the_difference_of_outputs_on_either_side_of_the_boundary(text):
    model = stirred("top-k").double()
    block = model.layers[0].mlp
    with recorded(model.float()) as layers, torch.no_grad():
        model(text.tokens)
    inputs = layers[0].inputs[0].numpy()
    rows = block.router.weight.detach().numpy().astype(np.float64)
    router = affine_router(rows, None, TINY)
    jumps = []
    for y in inputs.astype(np.float64):
        order = np.argsort(-(rows @ y))
        pairs = [rows[i] - rows[j] for i in order[:2] for j in order[2:]]
        normal = min((pair / np.linalg.norm(pair) for pair in pairs), key=lambda n: n @ y)
        edge = y - normal @ y * normal
        sides = torch.from_numpy(np.stack([edge + 1e-6 * normal, edge - 1e-6 * normal]))
        with torch.no_grad():
            here, there = block.double()(sides.unsqueeze(0))[0][0].numpy()
        jumps.append(np.linalg.norm(here - there) / np.linalg.norm(here))
    with torch.no_grad():
        found = jump_over_output(router, inputs, block.float())
    assert_allclose(found, np.median(jumps), rtol=1e-3)


def test_flips_are_those_of_torch_in_bfloat16():
    random = np.random.default_rng(5)
    rows, inputs = random.standard_normal((8, 16)), random.standard_normal((4000, 16))
    inputs = inputs.astype(np.float32)
    low = (
        torch.from_numpy(inputs).bfloat16().double()
        @ torch.from_numpy(rows.astype(np.float32)).bfloat16().double().T
    )
    exact = np.argsort(-(inputs.astype(np.float64) @ rows.astype(np.float32).T), axis=1)[:, :2]
    rounded = torch.sort(low.bfloat16().float(), dim=1, descending=True, stable=True)[1][:, :2]
    differ = (np.sort(exact, 1) != np.sort(rounded.numpy(), 1)).any(axis=1)
    assert 10 < differ.sum() < 400
    assert flipped_share(affine_router(rows, None, TINY), inputs) == differ.mean()


def test_random_rows_have_a_gram_z_near_0_and_orthonormal_ones_a_large_one():
    random = np.random.default_rng(2)
    drawn = [gram_z(random.standard_normal((8, 16)), np.ones(16), False) for _ in range(200)]
    assert abs(np.mean(drawn)) < 0.3
    assert_allclose(np.std(drawn), 1.0, atol=0.2)
    assert gram_z(np.eye(8, 16), np.ones(16), False) > 5.0
    # a vector that all rows share chooses nothing under an affine rule
    rows = random.standard_normal((8, 16))
    assert_allclose(gram_z(rows + 3.0, np.ones(16), True), gram_z(rows, np.ones(16), True))
