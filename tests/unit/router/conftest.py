"""A small checkpoint that can be spoilt in any way, and tiny random models of each family."""

from __future__ import annotations

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
    """Why the routers of a checkpoint are not loaded."""
    with pytest.raises(kind) as caught:
        loaded(folder, layers, **asked)
    return caught.value


def write_arrays(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    """A checkpoint of arrays of NumPy."""
    save_arrays(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def make_olmoe(tmp_path: Path) -> Maker:
    """Write a three-layer OLMoE checkpoint with changed tensors (None removes) and config."""

    def make(
        tensors: dict[str, torch.Tensor | None] | None = None,
        config: dict[str, Any] | None = None,
        prefix: str = "model.",
    ) -> Path:
        merged = olmoe_tensors(prefix=prefix) | (tensors or {})
        save_file(
            {k: v for k, v in merged.items() if v is not None}, tmp_path / "model.safetensors"
        )
        settings = {k: v for k, v in (CONFIG | (config or {})).items() if v is not ...}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        return tmp_path

    return make


_COMMON = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 40, "num_experts_per_tok": 2, "intermediate_size": 16, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip

#: What each family needs on top, small.
TINY: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 6, "norm_topk_prob": True},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 8, "head_dim": 16,
                  "mlp_only_layers": [1], "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 6},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2,
                    "moe_intermediate_size": 8, "first_k_dense_replace": 1, "kv_lora_rank": 8,
                    "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
                    "qk_nope_head_dim": 8, "routed_scaling_factor": 1.75},
    "gpt_oss": {"num_local_experts": 6, "head_dim": 16},
}  # fmt: skip


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], Any]:
    """A tiny random model of a family, its routers, biases and norms all non-trivial."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made: dict[str, Any] = {}

    def build(family: str) -> Any:
        if family not in made:
            config = AutoConfig.for_model(family, **(_COMMON | TINY[family]))
            torch.manual_seed(3)
            made[family] = AutoModelForCausalLM.from_config(config)
            for name, tensor in made[family].state_dict().items():
                if any(part in name for part in (".gate.", ".router.", "layernorm")):
                    tensor.copy_(torch.randn(tensor.shape) * 0.3 + 0.1)
        return made[family]

    return build
