"""What transformers loads of a folder is what is judged, bit for bit, or a finding says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import moegeom as mg
from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.family import family_of, family_of_class
from moegeom.router.load import load_routers
from tests.unit.checkpoint.gguf_file import moe_keys, write_gguf

_ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A model of two layers in one file."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("loaders") / "model"
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    held = load_file(folder / "model.safetensors")
    return {name: torch.from_numpy(values.copy()) for name, values in held.items()}


def _write(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file({k: v.clone() for k, v in tensors.items()}, folder / name, {"format": "pt"})


def _other(folder: Path) -> dict[str, torch.Tensor]:
    """The same model with a router that holds a NaN."""
    tensors = _tensors(folder)
    tensors[_ROUTER][0, 0] = torch.nan
    return tensors


def _index(folder: Path, weight_map: dict[str, str], name: str = "model.safetensors") -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / f"{name}.index.json").write_text(text)


def _shards(folder: Path) -> None:
    """Two shards and their index, in place of the one file."""
    tensors = _tensors(folder)
    parts = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for name, values in tensors.items():
        parts["model-2.safetensors" if "lm_head" in name else "model-1.safetensors"][name] = values
    for name, part in parts.items():
        _write(folder, name, part)
    _index(folder, {k: name for name, part in parts.items() for k in part})
    (folder / "model.safetensors").unlink()


def _config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _named_file(folder: Path) -> None:
    _write(folder, "evil.safetensors", _other(folder))
    _config(folder, transformers_weights="evil.safetensors")


def _named_index(folder: Path) -> None:
    other = _other(folder)
    _write(folder, "evil.safetensors", other)
    _index(folder, dict.fromkeys(other, "evil.safetensors"), "evil.safetensors")
    _config(folder, transformers_weights="evil.safetensors.index.json")


def _duplicate_in_a_later_shard(folder: Path) -> None:
    other = _other(folder)
    _shards(folder)
    held = load_file(folder / "model-2.safetensors")
    part = {name: torch.from_numpy(values.copy()) for name, values in held.items()}
    _write(folder, "model-2.safetensors", part | {_ROUTER: other[_ROUTER]})


def _single_file_for_a_dummy(folder: Path) -> None:
    other = _other(folder)
    _shards(folder)
    _write(folder, "model.safetensors", other)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    _index(folder, index | {"dummy": "model.safetensors"})


def _single_file_beside_an_index(folder: Path) -> None:
    other = _other(folder)
    _shards(folder)
    _write(folder, "model.safetensors", other)


def _pickle_beside(folder: Path) -> None:
    torch.save(_other(folder), folder / "pytorch_model.bin")


def _variant_beside(folder: Path) -> None:
    _write(folder, "model.fp16.safetensors", _other(folder))


def _later_file_without_an_index(folder: Path) -> None:
    _write(folder, "weights.safetensors", _other(folder))


def _consolidated_beside(folder: Path) -> None:
    _write(folder, "consolidated.safetensors", _other(folder))


def _another_rule_in_a_table(folder: Path) -> None:
    _config(folder, llm_config={"num_experts_per_tok": 1, "model_type": "qwen3_moe"})


def _the_same_rule_in_a_table(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    _config(folder, llm_config=config | {"architectures": None})


def _adapter_on_a_router(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    lora = LoraConfig(target_parameters=["mlp.gate.weight"], r=2, init_lora_weights=False)
    adapted = get_peft_model(model, lora)
    adapted.save_pretrained(str(folder))


def _unchanged(folder: Path) -> None:
    pass


def _equal_copies(folder: Path) -> None:
    tensors = _tensors(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    for name in ("consolidated.safetensors", "model.fp16.safetensors", "z.safetensors"):
        _write(folder, name, tensors)


#: Folders, and who takes other routers there than are judged.
FOLDERS: dict[Callable[[Path], None], tuple[str, ...]] = {
    _unchanged: (),
    _shards: (),
    _equal_copies: (),
    _named_file: ("vLLM", "SGLang", "llama.cpp's converter"),
    _named_index: ("vLLM", "SGLang", "llama.cpp's converter"),
    _duplicate_in_a_later_shard: ("transformers", "vLLM", "SGLang", "llama.cpp's converter"),
    _single_file_for_a_dummy: (),
    _single_file_beside_an_index: ("vLLM", "SGLang"),
    _pickle_beside: ("transformers (use_safetensors=False)",),
    _variant_beside: ("transformers (variant='fp16')",),
    _later_file_without_an_index: ("vLLM", "SGLang"),
    _consolidated_beside: ("vLLM",),
    _another_rule_in_a_table: ("llama.cpp's converter",),
    _the_same_rule_in_a_table: (),
    _adapter_on_a_router: ("PEFT",),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft about transformers
@pytest.mark.parametrize("change", FOLDERS, ids=lambda change: change.__name__[1:])
def test_what_transformers_loads_is_judged_or_a_finding_says_so(change, saved, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    change(folder)
    verdict = mg.check(folder)
    facts = json.loads(verdict.json())["run"]["loaders"]
    others = tuple(chain.from_iterable(o["loaders"] for o in facts["others"] if o["routers"]))
    others += ("PEFT",) if facts["adapter"] and facts["adapter"]["routers"] else ()
    assert others == FOLDERS[change], verdict.text()
    assert ("MGI117" in verdict.text()) == bool(others)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    judged = load_routers(open_checkpoint(folder)).routers
    are_equal = all(
        np.array_equal(router.weight, _loaded(loaded, router.layer), equal_nan=True)
        for router in judged
    )
    assert are_equal == (not {"transformers", "PEFT"} & set(others))
    are_finite = all(np.isfinite(_loaded(loaded, router.layer)).all() for router in judged)
    broken = any(other["not_finite"] and other["is_default"] for other in facts["others"])
    assert bool(verdict) == (are_finite and not broken), verdict.text()


def _loaded(model: Any, layer: int) -> np.ndarray:
    """The router that transformers computes with, an adapter included."""
    gate = model.model.layers[layer].mlp.gate
    with torch.no_grad():
        change = gate.get_delta_weight("default") if hasattr(gate, "get_delta_weight") else 0.0
        return (gate.weight + change).numpy()


def test_a_class_of_another_family_than_the_type_is_a_finding(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "model")
    _config(tmp_path / "model", architectures=["MixtralForCausalLM"])
    verdict = mg.check(tmp_path / "model")
    assert json.loads(verdict.json())["run"]["loaders"]["class_of_others"]["family"] == "mixtral"
    assert "MGI117" in verdict.text()
    assert not mg.check(tmp_path / "model", profile="release")


def test_classes_of_transformers_are_of_the_family_of_their_type():
    classes = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    families = {kind: family_of(kind) for kind in classes}
    of_class = {kind: family_of_class(classes[kind], kind) for kind in classes}
    assert sum(family is not None for family in of_class.values()) > 50
    others = {kind: f.name for kind, f in of_class.items() if f not in (None, families[kind])}
    assert others == {}


@pytest.mark.parametrize("name", [_ROUTER, "model.layers.0.post_attention_layernorm.weight"])
def test_a_part_with_model_in_front_and_without_is_refused(name, saved, tmp_path):
    """Transformers takes both for one parameter."""
    tensors = _tensors(saved)
    shutil.copytree(saved, tmp_path / "model")
    broken = torch.full_like(tensors[name], torch.nan)
    _write(tmp_path / "model", "model.safetensors", tensors | {name.removeprefix("model."): broken})
    assert not mg.check(tmp_path / "model")


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_model_for_llama_cpp_beside_the_weights_is_compared(is_changed, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "model")
    held = load_file(saved / "model.safetensors")
    tensors = {}
    for layer in range(2):
        of_layer = f"model.layers.{layer}."
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = held[f"{of_layer}mlp.gate.weight"]
        norm = held[f"{of_layer}post_attention_layernorm.weight"]
        tensors[f"blk.{layer}.ffn_norm.weight"] = norm
    if is_changed:
        tensors["blk.1.ffn_gate_inp.weight"] = -tensors["blk.1.ffn_gate_inp.weight"]
    keys = moe_keys(experts=8, hidden=16, layers=2, eps=1e-6)
    write_gguf(tmp_path / "model" / "q.gguf", "qwen3moe", tensors, keys=keys)
    others = json.loads(mg.check(tmp_path / "model").json())["run"]["loaders"]["others"]
    assert [(o["loaders"], o["routers"], o["reason"]) for o in others] == (
        [(["llama.cpp (-m q.gguf)"], ["text/1"], "")] if is_changed else []
    )
