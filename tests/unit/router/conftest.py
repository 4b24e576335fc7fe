"""A small checkpoint that can be spoilt in any way, and how its routers are loaded or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import MoeGeomError, RouterError
from moegeom.core.router import RouterSet
from moegeom.router.load import load_routers
from moegeom.router.requested_family import RequestedFamily

Maker = Callable[..., Path]

NUM_EXPERTS, HIDDEN = 6, 16

CONFIG: dict[str, Any] = {
    "model_type": "olmoe",
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 3,
}


def olmoe_tensors(num_layers: int = 3, prefix: str = "model.") -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(num_layers):
        at = f"{prefix}layers.{layer}"
        tensors[f"{at}.mlp.gate.weight"] = torch.randn(NUM_EXPERTS, HIDDEN, generator=draw)
        tensors[f"{at}.post_attention_layernorm.weight"] = torch.rand(HIDDEN, generator=draw)
        tensors[f"{at}.mlp.experts.0.gate_proj.weight"] = torch.randn(8, HIDDEN, generator=draw)
    return tensors


def loaded(folder: Path, layers: str | None = None, **asked: Any) -> RouterSet:
    """The routers of a checkpoint, of the family that is asked for in the words of options."""
    return load_routers(open_checkpoint(folder), layers, RequestedFamily(**asked))


def refusal(
    folder: Path, layers: str | None = None, kind: type[MoeGeomError] = RouterError, **asked: Any
) -> MoeGeomError:
    with pytest.raises(kind) as caught:
        loaded(folder, layers, **asked)
    return caught.value


def write_arrays(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    save_arrays(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def family_file(folder: Path, more: str = "") -> Path:
    """A family of one's own: routers of one stack that choose one expert."""
    file = folder / "mine.toml"
    file.write_text(
        "text = 'softmax, top {top_k} of {num_experts}'\n"
        "[[stacks]]\nname = 'text'\nweight = ['layers.{layer}.mlp.gate.weight']\n"
        f"{more}top_k = 1\nscore = 'softmax'\nweights.source = 'scores'\n"
    )
    return file


@pytest.fixture
def make_olmoe(tmp_path: Path) -> Maker:
    def make(tensors=None, config=None, prefix: str = "model.") -> Path:
        merged = olmoe_tensors(prefix=prefix) | (tensors or {})
        save_file(
            {k: v for k, v in merged.items() if v is not None}, tmp_path / "model.safetensors"
        )
        settings = {k: v for k, v in (CONFIG | (config or {})).items() if v is not ...}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        return tmp_path

    return make
