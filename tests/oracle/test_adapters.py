"""An adapter is judged over its base: the routers of both together are those that PEFT makes."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from safetensors.numpy import load_file, save_file

import moegeom as mg
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import CheckpointError
from moegeom.router.load import load_routers
from tests.unit.check.conftest import Case, keep, write_model

E, H = 16, 64


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(H, H, bias=False)})
        self.mlp = torch.nn.ModuleDict({"gate": torch.nn.Linear(H, E, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp["gate"](self.self_attn["q_proj"](x))


class Model(torch.nn.Module):
    """Modules that are called as those of a model, in the order of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(Block() for _ in range(3))})

    def forward(self, x: torch.Tensor) -> Any:
        return [layer(x) for layer in self.model["layers"]]


def adapted(folder: Path, config: Any) -> dict[int, np.ndarray]:
    """Writes base and adapter, and returns the routers that PEFT merges them to."""
    base = write_model(folder, Case(family="qwen3_moe"), keep)
    model = Model()
    stored = load_file(base / "model.safetensors")
    gates = {n: torch.tensor(w.astype(np.float32)) for n, w in stored.items() if "gate.weight" in n}
    model.load_state_dict(gates, strict=False)
    torch.manual_seed(0)
    peft = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.05 * torch.rand_like(parameter))
    peft.save_pretrained(str(folder / "adapter"))
    change(folder / "adapter", base_model_name_or_path="org/model")
    merged = peft.merge_and_unload()
    return {
        i: layer.mlp["gate"].weight.detach().numpy()
        for i, layer in enumerate(merged.model["layers"])
    }


def change(adapter: Path, **settings: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def lora(**settings: Any) -> LoraConfig:
    defaults = {
        "r": 4,
        "lora_alpha": 6,
        "init_lora_weights": False,
        "target_modules": ["gate", "q_proj"],
    }
    return LoraConfig(**defaults | settings)


KINDS = {
    "lora": lora(),
    "rslora": lora(use_rslora=True),
    "dora": lora(use_dora=True),
    "ranks and alphas of their own": lora(rank_pattern={"layers.1.mlp.gate": 2}, alpha_pattern={"gate": 3}),
    "one layer": lora(target_modules=["layers.2.mlp.gate"]),
    "modules that are saved": lora(target_modules=["q_proj"], modules_to_save=["gate"]),
    "parameters": lora(target_modules=[], target_parameters=["mlp.gate.weight"]),
    "attention alone": lora(target_modules=["q_proj"]),
}  # fmt: skip


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_routers_of_base_and_adapter_are_those_that_peft_merges(config, tmp_path):
    merged = adapted(tmp_path, config)
    found = load_routers(open_checkpoint(tmp_path / "adapter"))
    assert len(found.routers) == 3
    for router in found.routers:
        np.testing.assert_allclose(router.weight, merged[router.layer], atol=2e-6)
    verdict = mg.check(tmp_path / "adapter")
    assert verdict, verdict.text()
    assert "adapter over model" in verdict.text()
    base = load_routers(open_checkpoint(tmp_path / "model"))
    assert (base.fingerprint == found.fingerprint) == (config is KINDS["attention alone"])


def test_a_router_that_the_adapter_breaks_fails_the_gate(tmp_path):
    adapted(tmp_path, lora())
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if "layers.1.mlp.gate.lora_A" in n)
    tensors[name][0, 0] = np.nan
    save_file(tensors, file)
    assert mg.check(tmp_path / "model")
    assert not mg.check(tmp_path / "adapter")
    # the file of an adapter is no file of routers, whatever it is taken for
    assert not mg.check(file)


def test_names_of_another_version_of_the_model_are_those_of_the_base(tmp_path):
    merged = adapted(tmp_path, lora())
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({n.replace(".mlp.gate", ".moe.gate"): v for n, v in load_file(file).items()}, file)
    for router in load_routers(open_checkpoint(tmp_path / "adapter")).routers:
        np.testing.assert_allclose(router.weight, merged[router.layer], atol=2e-6)


def test_modules_that_stay_without_the_adapter_are_named(tmp_path):
    adapted(tmp_path, lora(target_modules=["gate"]))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    more = {
        f"base_model.model.model.layers.1.mlp.experts.lora_{h}.weight": np.ones((4, 4), np.float32)
        for h in "AB"
    }
    save_file(load_file(file) | more, file)
    assert "what the adapter changes in model.layers.1.mlp.experts" in re.sub(
        r"\s+", " ", mg.check(tmp_path / "adapter").text()
    )


def without(folder: Path, part: str) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({n: v for n, v in load_file(file).items() if part not in n}, file)


def renamed(folder: Path, old: str, new: str) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({n.replace(old, new): v for n, v in load_file(file).items()}, file)


#: What is changed in the folder of an adapter, and what the refusal names.
REFUSALS = {
    "a base that is not here": (lambda f: change(f, base_model_name_or_path="org/other"), "'org/other' is not on"),
    "no base": (lambda f: change(f, base_model_name_or_path=None), "is not on this machine"),
    "its own folder": (lambda f: change(f, base_model_name_or_path="."), "is not on this machine"),
    "another kind": (lambda f: change(f, peft_type="LOHA"), "'LOHA'"),
    "a start that changes the base": (lambda f: change(f, init_lora_weights="pissa"), "'pissa'"),
    "transposed weights": (lambda f: change(f, fan_in_fan_out=True), "'fan_in_fan_out'"),
    "layers that are repeated": (lambda f: change(f, layer_replication=[[0, 2]]), "'layer_replication'"),
    "an expression": (lambda f: change(f, alpha_pattern={"gate|up": 2}), "'alpha_pattern'"),
    "another rank": (lambda f: change(f, r=8), "'r' is 8"),
    "an alpha of words": (lambda f: change(f, lora_alpha="6"), "'lora_alpha'"),
    "magnitudes that are lost": (lambda f: change(f, use_dora=True), "lora_magnitude_vector"),
    "one half": (lambda f: without(f, "1.mlp.gate.lora_B"), "has no lora_B"),
    "a router that is none": (lambda f: renamed(f, "layers.1.mlp", "layers.7.mlp"), "layers.7.mlp.gate"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "without its weights"),
    "an embedding": (lambda f: renamed(f, "lora_A", "lora_embedding_A"), "no part of a linear LoRA"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "words"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_not_applied_as_peft_does_is_refused_by_name(spoil, words, tmp_path):
    adapted(tmp_path, lora())
    spoil(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load_routers(open_checkpoint(tmp_path / "adapter"))


def test_an_adapter_of_another_kind_and_one_over_an_adapter_are_refused(tmp_path):
    adapted(tmp_path, LoHaConfig(r=2, target_modules=["gate"], init_weights=False))
    with pytest.raises(CheckpointError, match="LOHA"):
        open_checkpoint(tmp_path / "adapter")
    change(tmp_path / "adapter", peft_type="LORA", base_model_name_or_path=str(tmp_path / "b"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="the base of an adapter is a model"):
        open_checkpoint(tmp_path / "adapter")
