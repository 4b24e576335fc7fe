"""Routers that take every expert with a positive logit are listed, whatever says that they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError, UsageError
from moegeom.core.router import RouterSet
from moegeom.router.load import load_routers
from moegeom.router.requested_family import RequestedFamily

LAYERS, EXPERTS, HIDDEN = 2, 6, 16

ARGUMENTS: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_experts": EXPERTS, "moe_router_topk": 1,
    "moe_router_load_balancing_type": "aux_loss", "normalization": "RMSNorm", "norm_epsilon": 1e-5,
    "gain_offset": 0.0,
}  # fmt: skip

RULES = ["megatron-softmax", "megatron-softmax-first", "megatron-sigmoid"]


def _loaded(folder: Path, **arguments: Any) -> RouterSet:
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}."
        weight = random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
        tensors[f"{at}mlp.router.weight"] = weight
        tensors[f"{at}pre_mlp_layernorm.weight"] = np.ones(HIDDEN, np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(ARGUMENTS | arguments))
    return load_routers(open_checkpoint(folder))


@pytest.mark.parametrize("rule", RULES)
def test_relu_routing_is_listed_with_the_reason(rule: str, tmp_path: Path) -> None:
    with pytest.raises(RouterError) as caught:
        _loaded(tmp_path, model_type=rule, moe_relu_routing=True)
    assert "'decoder.layers.0.mlp.router.weight' ...) cannot be measured: a token takes every " in (
        caught.value.message
    )
    assert caught.value.message.endswith("so that their number varies from token to token.")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("flag", [False, None])
def test_without_the_flag_the_rule_is_that_of_the_family(
    rule: str, flag: bool | None, tmp_path: Path
) -> None:
    found = _loaded(tmp_path, model_type=rule, moe_relu_routing=flag)
    assert [router.name for router in found.routers] == ["text/0", "text/1"]
    assert found.skipped == ()


def test_a_flag_that_is_no_flag_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RouterError, match="'moe_relu_routing' is 'yes' .*expected true or false"):
        _loaded(tmp_path, model_type=RULES[0], moe_relu_routing="yes")


def test_relu_is_refused_as_a_score() -> None:
    asked = RequestedFamily(pattern=r"layers\.(\d+)\.router\.weight", top_k=1, score="relu")
    with pytest.raises(UsageError) as caught:
        asked.family(["layers.0.router.weight"])
    assert caught.value.message == (
        "--score relu: a token takes every expert whose logit is positive, as many as there are; "
        "only rules that choose a fixed number of experts are measured."
    )


def test_a_single_expert_keeps_its_sigmoid_as_weight(tmp_path: Path) -> None:
    one = _loaded(tmp_path, model_type="megatron-sigmoid").routers[0]
    two = _loaded(tmp_path, model_type="megatron-sigmoid", moe_router_topk=2).routers[0]
    assert (one.rule.weights.renormalise, two.rule.weights.renormalise) == (False, True)
