"""The same routers under the names and in the shapes of other trainers and of original files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moegeom.core.errors import RouterError
from moegeom.core.router import Router
from tests.unit.router.conftest import CONFIG, loaded, write_arrays

EXPERTS, HIDDEN = 6, 16

_RANDOM = np.random.default_rng(0)
WEIGHT = _RANDOM.normal(size=(EXPERTS, HIDDEN)).astype(np.float32)
BIAS = _RANDOM.normal(size=EXPERTS).astype(np.float32)
GAIN = _RANDOM.normal(size=HIDDEN).astype(np.float32)


@dataclass(frozen=True)
class Layout:
    """Where a layout keeps the router of layer 1, and its config."""

    config: dict[str, Any]
    weight: str
    norm: str
    stored: Callable[[np.ndarray], np.ndarray] = lambda weight: weight
    bias: str = ""


_OLMOE = CONFIG | {"num_hidden_layers": 2, "hidden_size": HIDDEN}
_ORIGINAL = {"dim": HIDDEN, "n_layers": 2, "norm_eps": 1e-5}
_GPT_OSS = {"num_hidden_layers": 2, "num_experts": EXPERTS, "experts_per_token": 2,
            "hidden_size": HIDDEN, "swiglu_limit": 7.0}  # fmt: skip
_DEEPSEEK = {"model_type": "deepseek_v3", "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
             "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
             "rms_norm_eps": 1e-6, "num_hidden_layers": 2, "first_k_dense_replace": 1,
             "hidden_size": HIDDEN}  # fmt: skip

LAYOUTS = {
    "OLMo-core": Layout(
        _OLMOE, "blocks.1.feed_forward_moe.router.weight", "blocks.1.feed_forward_norm.weight",
        lambda weight: weight.reshape(-1),
    ),
    "Llama 4, original": Layout(
        _ORIGINAL
        | {"moe_args": {"num_experts": EXPERTS, "top_k": 1, "interleave_moe_layer_step": 1}},
        "layers.1.feed_forward.router_DE", "layers.1.ffn_norm.weight",
        lambda weight: np.ascontiguousarray(weight.T),
    ),
    "Mixtral, consolidated": Layout(
        _ORIGINAL | {"moe": {"num_experts": EXPERTS, "num_experts_per_tok": 2}},
        "layers.1.feed_forward.gate.weight", "layers.1.ffn_norm.weight",
    ),
    "gpt-oss, original": Layout(
        _GPT_OSS, "block.1.mlp.gate.weight", "block.1.mlp.norm.scale", bias="block.1.mlp.gate.bias"
    ),
    "torchtitan": Layout(
        _DEEPSEEK, "layers.1.moe.router.gate.weight", "layers.1.ffn_norm.weight",
        bias="layers.1.moe.expert_bias_E",
    ),
}  # fmt: skip


def _router(layout: Layout, folder: Path) -> Router:
    tensors = {layout.weight: layout.stored(WEIGHT), layout.norm: GAIN}
    tensors |= {layout.bias: BIAS} if layout.bias else {}
    write_arrays(folder, tensors, layout.config)
    if "dim" in layout.config:
        (folder / "config.json").rename(folder / "params.json")
    (router,) = loaded(folder).routers
    return router


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_router_is_the_same_wherever_it_comes_from(name, tmp_path):
    router = _router(LAYOUTS[name], tmp_path)
    assert (router.name, router.weight.flags.c_contiguous) == ("text/1", True)
    np.testing.assert_array_equal(router.weight, WEIGHT)
    np.testing.assert_array_equal(router.gain, GAIN)
    bias = router.logit_bias if router.selection_bias is None else router.selection_bias
    np.testing.assert_array_equal(bias, BIAS if LAYOUTS[name].bias else None)


def test_a_flat_weight_that_does_not_divide_is_refused(tmp_path):
    cut = replace(LAYOUTS["OLMo-core"], stored=lambda weight: weight.reshape(-1)[:-1])
    with pytest.raises(RouterError, match=r"has shape \(95,\), expected \(experts \* hidden,\)"):
        _router(cut, tmp_path)
