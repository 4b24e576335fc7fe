"""Routers that take every expert with a positive logit, whatever says that they do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import moegeom as mg
from moegeom.core.errors import RouterError, RouterRuleError
from moegeom.core.router import RouterSet
from moegeom.engine.prepared import prepare
from moegeom.engine.route import route
from moegeom.engine.trust import examine
from moegeom.kernels.table import load_kernels
from moegeom.testing.array_source import ArraySource
from tests.unit.router.conftest import loaded, write_arrays

LAYERS, EXPERTS, HIDDEN = 2, 6, 16

ARGUMENTS: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_experts": EXPERTS, "moe_router_topk": 1,
    "moe_router_load_balancing_type": "aux_loss", "normalization": "RMSNorm", "norm_epsilon": 1e-5,
    "gain_offset": 0.0,
}  # fmt: skip

RULES = ["megatron-softmax", "megatron-softmax-first", "megatron-sigmoid"]


ALLOWED = {"stale_inputs": True, "unverified": True}


def _loaded(folder: Path, **arguments: Any) -> RouterSet:
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}."
        weight = random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
        tensors[f"{at}mlp.router.weight"] = weight
        tensors[f"{at}pre_mlp_layernorm.weight"] = np.ones(HIDDEN, np.float32)
    return loaded(write_arrays(folder, tensors, ARGUMENTS | arguments))


def _inputs(seed: int, tokens: int) -> np.ndarray:
    """Of length 1 in each channel on the average, as a norm leaves them."""
    inputs = np.random.default_rng(seed).standard_normal((tokens, HIDDEN)).astype(np.float32)
    return inputs / np.sqrt((inputs**2).mean(axis=1, keepdims=True))


@pytest.fixture
def relu(tmp_path: Path) -> RouterSet:
    return _loaded(tmp_path, model_type=RULES[0], moe_relu_routing=True)


@pytest.mark.parametrize("rule", RULES)
def test_relu_routing_takes_every_expert_with_a_positive_logit(rule, tmp_path):
    found = _loaded(tmp_path, model_type=rule, moe_relu_routing=True)
    assert {router.rule.pick for router in found.routers} == {"threshold"}
    assert {router.rule.num_chosen for router in found.routers} == {None}
    assert found.family_text == "ReLU of logits, those above 0 of 6 (training aims at 1)"
    # without the flag the rule is that of the family
    for flag in (False, None):
        routers = _loaded(tmp_path, model_type=rule, moe_relu_routing=flag)
        assert [router.name for router in routers.routers] == ["text/0", "text/1"]
        assert {router.rule.pick for router in routers.routers} == {"top_k"}
        assert routers.skipped == ()
    with pytest.raises(RouterError, match="'moe_relu_routing' is 'yes' .*expected true or false"):
        _loaded(tmp_path, model_type=rule, moe_relu_routing="yes")


def test_the_choice_the_weights_and_the_distance_are_those_of_torch_relu(relu):
    router = relu.routers[0]
    inputs = np.random.default_rng(1).standard_normal((500, HIDDEN)).astype(np.float32)
    routed = route(router, inputs)
    logits = (
        torch.from_numpy(inputs).double() @ torch.from_numpy(router.weight.astype(np.float64)).T
    )
    gate = torch.relu(logits).numpy()
    dense = np.zeros((500, EXPERTS))
    token, slot = np.nonzero(routed.chosen >= 0)
    dense[token, routed.chosen[token, slot]] = routed.weights[token, slot]
    assert_allclose(dense, gate, atol=1e-6)
    assert (routed.num_chosen == (gate > 0.0).sum(axis=1)).all()
    lengths = np.linalg.norm(router.weight.astype(np.float64), axis=1)
    assert_allclose(
        routed.boundary_distance, (abs(logits.numpy()) / lengths).min(axis=1), atol=1e-6
    )
    assert (routed.boundary_distance_upper == routed.boundary_distance).all()


def test_recorded_choices_of_any_number_are_held_against_the_rule(relu):
    routers, inputs = relu.routers, _inputs(3, 300)
    chosen = {r.name: route(r, inputs).chosen for r in routers}
    shares = []
    for shift in (0, 1):
        turned = {n: np.roll(ids, shift, axis=0)[:, ::-1].copy() for n, ids in chosen.items()}
        source = ArraySource({router.name: inputs for router in routers}, chosen=turned)
        shares += [
            examine([prepare(r)], source, "", load_kernels("cpu"), ALLOWED).share_reproduced
            for r in routers
        ]
    assert shares[:2] == [1.0, 1.0]
    assert max(shares[2:]) < 0.2


def test_a_scan_has_sizes_of_sets_and_loads_and_says_what_it_lacks(relu, tmp_path):
    inputs = _inputs(4, 600)
    report = mg.scan(str(tmp_path), {"text/0": inputs, "text/1": inputs}, stage="router_input")
    (row, _) = report.layers().to_pylist()
    gate = inputs @ relu.routers[0].weight.T > 0.0
    assert row["num_chosen_mean"] == pytest.approx(gate.sum(axis=1).mean(), abs=0.01)
    assert row["no_expert_share"] == pytest.approx((~gate.any(axis=1)).mean(), abs=0.002)
    load = gate.sum(axis=0)
    assert row["max_vio_global"] == pytest.approx(load.max() / load.mean() - 1.0, abs=0.01)
    assert row.get("max_vio_floor") is None
    assert row["boundary_distance_p50"] > 0.0
    (part, _) = report.value.run["parts"].values()
    assert part["reasons"]["routing_entropy"] == "this rule takes every expert above a threshold"


@pytest.mark.parametrize("command", ["imbalance", "perturb", "cells", "regions"])
def test_commands_about_the_k_best_refuse_it_by_name(command, relu, tmp_path):
    inputs = np.ones((8, HIDDEN), np.float32)
    tokens = {router.name: inputs for router in relu.routers}
    with pytest.raises(RouterRuleError, match="takes every expert above a threshold"):
        getattr(mg, command)(str(tmp_path), tokens, stage="router_input")


def test_relu_is_a_score_that_options_may_name(relu, tmp_path):
    pattern = r"decoder\.layers\.(\d+)\.mlp\.router\.weight"
    routers = loaded(tmp_path, pattern=pattern, top_k=2, score="relu").routers
    assert [router.rule.pick for router in routers] == ["threshold", "threshold"]
