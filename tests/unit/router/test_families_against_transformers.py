"""Oracle: transformers 5.23.0 builds and saves five families; every part of a router is its own.

What the routers of all families choose: tests/families.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.router import GroupMask, Router, RouterSet, Rule, Weights
from moegeom.router.load import load_routers

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


@pytest.fixture(params=[True, False], ids=["disk", "memory"])
def layout(request: Any) -> bool:
    """Hub names or in-memory names; both occur in the wild."""
    return request.param


def _saved(model: Any, folder: Path, layout: bool) -> RouterSet:
    model.save_pretrained(folder, save_original_format=layout)
    return load_routers(open_checkpoint(folder))


@pytest.mark.parametrize("family", _RULES)
def test_routers_are_those_of_the_model(
    family: str, layout: bool, tiny_model: Any, tmp_path: Path
) -> None:
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


def _chosen(router: Router, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chosen experts and routing weights, by the plain reading of the rule."""
    logits = hidden @ router.weight.T
    if router.logit_bias is not None:
        logits = logits + router.logit_bias
    exp = np.exp(logits - logits.max(1, keepdims=True))
    scores = {
        "softmax": exp / exp.sum(1, keepdims=True),
        "sigmoid": 1 / (1 + np.exp(-logits)),
        "identity": logits,
    }[router.rule.score]
    ranked = scores if router.selection_bias is None else scores + router.selection_bias
    groups = router.rule.groups
    if groups:
        cut = ranked.reshape(len(ranked), groups.num_groups, -1)
        best = np.sort(cut, axis=2)[:, :, -2:].sum(2)
        dropped = np.argsort(-best, axis=1)[:, groups.num_kept :]
        np.put_along_axis(cut, dropped[:, :, None], groups.fill, axis=1)
        ranked = cut.reshape(ranked.shape)
    chosen = np.argsort(-ranked, axis=1)[:, : router.rule.top_k]
    weights = np.take_along_axis(scores, chosen, axis=1)
    rule = router.rule.weights
    if rule.source == "softmax_of_selected_logits":
        weights = np.exp(np.take_along_axis(logits, chosen, axis=1))
        weights = weights / weights.sum(1, keepdims=True)
    if rule.renormalise:
        weights = weights / (weights.sum(1, keepdims=True) + rule.epsilon)
    return chosen, weights * rule.scale


@pytest.mark.parametrize("family", _RULES)
def test_the_rule_read_from_the_config_routes_like_the_model(
    family: str, tiny_model: Any, tmp_path: Path
) -> None:
    model = tiny_model(family)
    hidden = torch.randn(200, 32, generator=torch.Generator().manual_seed(9))
    for router in _saved(model, tmp_path, layout=True).routers:
        mlp = model.model.layers[router.layer].mlp
        module = mlp.router if family == "gpt_oss" else mlp.gate
        with torch.no_grad():
            _, weights, chosen = module(hidden)
        found, found_weights = _chosen(router, hidden.numpy().astype(np.float64))
        order, found_order = chosen.numpy().argsort(1), found.argsort(1)
        np.testing.assert_array_equal(
            np.take_along_axis(found, found_order, 1),
            np.take_along_axis(chosen.numpy(), order, 1),
        )
        np.testing.assert_allclose(
            np.take_along_axis(found_weights, found_order, 1),
            np.take_along_axis(weights.numpy(), order, 1),
            atol=2e-6,
        )


def test_bfloat16_models_load_as_torch_upcasts_them(tiny_model: Any, tmp_path: Path) -> None:
    import copy

    model = copy.deepcopy(tiny_model("deepseek_v3")).to(torch.bfloat16)
    found = _saved(model, tmp_path, layout=True)
    gate = model.model.layers[1].mlp.gate
    router = found.routers[0]
    assert router.provenance.stored_dtype == "BF16"
    np.testing.assert_array_equal(router.weight, gate.weight.detach().float().numpy(), strict=True)
