"""Oracle: transformers 5.23.0 builds and saves five families; every part of a router is its own.

What the routers of all families choose: tests/families.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moegeom.core.router import GroupMask, RouterSet, Rule, Weights
from tests.unit.router.conftest import loaded

_RULES = {
    "olmoe": Rule(2, "softmax", Weights("scores", renormalise=True)),
    "qwen3_moe": Rule(2, "softmax", Weights("scores", renormalise=True)),
    "mixtral": Rule(2, "softmax", Weights("scores", renormalise=True)),
    "deepseek_v3": Rule(
        2,
        "sigmoid",
        Weights("scores", renormalise=True, epsilon=1e-20, scale=1.75),
        has_selection_bias=True,
        groups=GroupMask(4, 2, "top2_sum", -np.inf),
    ),
    "gpt_oss": Rule(2, "identity", Weights("softmax_of_selected_logits"), has_logit_bias=True),
}
_LAYERS = {"qwen3_moe": (0, 2), "deepseek_v3": (1, 2)}
_TEXTS = {
    "olmoe": "softmax, top 2 of 6",
    "qwen3_moe": "softmax, top 2 of 6",
    "mixtral": "softmax, top 2 of 6",
    "deepseek_v3": "sigmoid + selection bias, best 2 of 4 groups, top 2 of 8",
    "gpt_oss": "logits with bias, top 2 of 6, softmax over the chosen",
}
_EPS = {"qwen3_moe": 1e-6, "deepseek_v3": 1e-6}


def _saved(model: Any, folder: Path, layout: bool) -> RouterSet:
    model.save_pretrained(folder, save_original_format=layout)
    return loaded(folder)


@pytest.mark.parametrize("layout", [True, False], ids=["hub", "memory"])
@pytest.mark.parametrize("family", _RULES)
def test_routers_are_those_of_the_model(family, layout, tiny_model, tmp_path):
    model = tiny_model(family)
    found = _saved(model, tmp_path, layout)
    layers = _LAYERS.get(family, (0, 1, 2))
    assert [r.name for r in found.routers] == [f"text/{i}" for i in layers]
    assert (found.family, found.num_expected) == (family, len(layers))
    assert found.family_text == _TEXTS[family]
    assert (found.notes, found.skipped) == ((), ())
    for router in found.routers:
        block = model.model.layers[router.layer]
        module = block.mlp.router if family == "gpt_oss" else block.mlp.gate
        parts = {
            "weight": (router.weight, module.weight),
            "logit bias": (router.logit_bias, getattr(module, "bias", None)),
            "selection bias": (
                router.selection_bias,
                getattr(module, "e_score_correction_bias", None),
            ),
            "gain": (router.gain, block.post_attention_layernorm.weight),
        }
        for part, (read, truth) in parts.items():
            assert (read is None) == (truth is None), part
            if truth is not None:
                np.testing.assert_array_equal(read, truth.detach().numpy(), strict=True)
        assert router.rule == _RULES[family]
        assert router.norm is not None
        assert (router.norm.kind, router.norm.eps) == ("rms", _EPS.get(family, 1e-5))


def test_bfloat16_models_load_as_torch_upcasts_them(tiny_model, tmp_path):
    model = copy.deepcopy(tiny_model("deepseek_v3")).to(torch.bfloat16)
    found = _saved(model, tmp_path, layout=True)
    gate = model.model.layers[1].mlp.gate
    router = found.routers[0]
    assert router.provenance.stored_dtype == "BF16"
    np.testing.assert_array_equal(router.weight, gate.weight.detach().float().numpy(), strict=True)
