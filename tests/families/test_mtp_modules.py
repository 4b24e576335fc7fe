"""Routers of layers that predict further tokens, stored in modules of their own.

The oracle is a router of the model itself: its layer is stored a second time where such modules
are, so that the same family, rule and numbers must come back from there.
"""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.router import Router, RouterSet
from moegeom.router.family import families, load_family
from moegeom.router.load import load_routers
from tests.by_day import by_day
from tests.families.tiny_models import read, saved

#: Where the released checkpoints, or the patterns that transformers ignores, have the modules.
MODULES = {
    **dict.fromkeys(("exaone_moe", "mellum", "minimax_m3_vl", "qwen3_5_moe"), "mtp.layers.0."),
    **dict.fromkeys(("qwen3_next", "qwen4_exp"), "mtp.layers.0."),
    **dict.fromkeys(("dots3_note", "mimo_v2_flash"), "model.mtp.layers.0."),
    "deepseek_v4": "mtp.0.",
    "ernie4_5_moe": "model.mtp_block.0.",
    "hy_v4": "model.mtp_layers.0.",
    "inkling": "model.mtp.layers.0.transformer_block.",
    "longcat_flash": "model.mtp.layers.0.transformer_layer.",
    "nemo_speechlm": "llm.mtp.layers.1.",
    "nemotron_h": "mtp.layers.1.",
    "nemotron_h_omni": "language_model.mtp.layers.1.",
}

BY_PLACE = {
    "beside the layers": "deepseek_v4",
    "below the model": "ernie4_5_moe",
    "a part of a module": "longcat_flash",
    "a later layer, of a part": "nemo_speechlm",
    "a norm in front": "qwen3_next",
}


def _with_module(name: str, folder: Path, **others: torch.Tensor | None) -> Router:
    """The router of a layer that is there as a module, too, with other tensors (None: without)."""
    shutil.copytree(saved(name), folder, dirs_exist_ok=True)
    router = [r for r in read(name).routers if r.stack == "text"][-1]
    head, layer, _ = router.provenance.tensors[0].rpartition(f"layers.{router.layer}.")
    file = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor | None] = dict(load_file(file))
    tensors |= {
        key.replace(head + layer, MODULES[name]): tensor.clone()
        for key, tensor in load_file(file).items()
        if key.startswith(head + layer)
    }
    tensors |= {MODULES[name] + key: tensor for key, tensor in others.items()}
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, file)
    return router


def _names(routers: RouterSet) -> list[str]:
    return [router.name for router in routers.routers]


@pytest.mark.parametrize("name", by_day(MODULES, BY_PLACE))
def test_a_module_holds_the_router_that_its_layer_has(name, tmp_path):
    before, own = read(name), _with_module(name, tmp_path)
    after = load_routers(open_checkpoint(tmp_path))
    number = int(re.findall("[0-9]+", MODULES[name])[0])
    (module,) = [r for r in after.routers if r.stack == "mtp"]
    assert (module.name, module.layer) == (f"mtp/{number}", number)
    assert module.rule == own.rule
    for part in ("weight", "gain", "norm_bias", "logit_bias", "selection_bias", "expert_scale"):
        np.testing.assert_array_equal(getattr(module, part), getattr(own, part), part)
    if own.norm is not None:
        assert module.norm is not None
        assert replace(module.norm, tensor=own.norm.tensor) == own.norm
    assert [name for name in _names(after) if name != module.name] == _names(before)
    assert after.skipped == before.skipped
    assert after.layer_notes == before.layer_notes
    if before.num_expected is not None:
        assert after.num_expected == before.num_expected + 1


def test_a_module_without_its_norm_is_listed_and_the_model_is_loaded(tmp_path):
    _with_module("qwen3_next", tmp_path, **{"post_attention_layernorm.weight": None})
    after = load_routers(open_checkpoint(tmp_path))
    assert _names(after) == _names(read("qwen3_next"))
    (skipped,) = after.skipped
    assert skipped.tensor == "mtp.layers.0.mlp.gate.weight"
    assert skipped.reason == (
        "router mtp/0: tensor 'mtp.layers.0.post_attention_layernorm.weight' is missing; "
        "routers of family qwen3_next have a norm in front"
    )


def test_layers_chooses_modules_by_their_number_and_a_dense_one_is_no_router(tmp_path):
    _with_module("qwen3_next", tmp_path)
    chosen = load_routers(open_checkpoint(tmp_path), layers="0")
    assert _names(chosen) == ["text/0", "mtp/0"]
    assert chosen.num_expected == 2
    dense = {"mlp.gate.weight": None, "mlp.gate_proj.weight": torch.ones(4, 64)}
    _with_module("qwen3_next", tmp_path, **dense)
    loaded = load_routers(open_checkpoint(tmp_path))
    assert {r.stack for r in loaded.routers} == {"text"}
    assert loaded.skipped == ()


def test_every_family_with_modules_is_tested():
    named = {n for n in families() if any(stack.mtp_layers for stack in load_family(n).stacks)}
    # the text type of dots3_note has the modules of the whole
    assert named == {*MODULES, "dots3_note_text"}
