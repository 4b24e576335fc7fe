"""Full-size routers with planted defects, and tokens that are not tame.

Shapes of real models, no trained weights: what a test plants, a scan must find again. Nothing here
says anything about load or entropy of a real model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from moegeom.core.shapes import Float32
from moegeom.core.tokens import TokenColumns
from moegeom.tokens.recording.writer import RecordingWriter


@dataclass(frozen=True)
class SyntheticModel:
    """Shape and defects. Defects name layers: ``duplicate`` copies row 1 over row 5, ``zero``
    clears row 2, ``long`` makes row 3 ``long_factor`` times as long and points it at the mean of
    the tokens.
    """

    family: str = "qwen3_moe"
    hidden: int = 2048
    experts: int = 64
    top_k: int = 8
    layers: int = 3
    duplicate: tuple[int, ...] = ()
    zero: tuple[int, ...] = ()
    long: tuple[int, ...] = ()
    long_factor: float = 3.0
    seed: int = 0


@dataclass(frozen=True)
class _Layout:
    """How a family names things; only what a router reader looks at is written."""

    weight: str
    norm: str
    bias: str | None
    config: Mapping[str, Any]


def _layout(model: SyntheticModel) -> _Layout:
    prefix = "model.layers.{layer}."
    shared = {"num_hidden_layers": model.layers, "hidden_size": model.hidden, "rms_norm_eps": 1e-6}
    softmax = _Layout(
        prefix + "mlp.gate.weight",
        prefix + "post_attention_layernorm.weight",
        None,
        {
            **shared,
            "model_type": "qwen3_moe",
            "num_experts": model.experts,
            "num_experts_per_tok": model.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    )
    groups = max(model.experts // 32, 1)
    sigmoid = _Layout(
        softmax.weight,
        softmax.norm,
        prefix + "mlp.gate.e_score_correction_bias",
        {
            **shared,
            "model_type": "deepseek_v3",
            "n_routed_experts": model.experts,
            "num_experts_per_tok": model.top_k,
            "norm_topk_prob": True,
            "n_group": groups,
            "topk_group": max(groups // 2, 1),
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 0,
        },
    )
    return {"qwen3_moe": softmax, "deepseek_v3": sigmoid}[model.family]


def mean_direction(model: SyntheticModel) -> Float32[np.ndarray, "hidden"]:
    """Unit vector that the tokens of every layer lean towards."""
    direction = np.random.default_rng(model.seed + 1).standard_normal(model.hidden)
    return (direction / np.linalg.norm(direction)).astype(np.float32)


def write_checkpoint(path: Path, model: SyntheticModel) -> Path:
    """A checkpoint directory with routers (bf16), norms and nothing else."""
    generator = np.random.default_rng(model.seed)
    layout = _layout(model)
    tensors: dict[str, np.ndarray] = {}
    for layer in range(model.layers):
        rows = generator.standard_normal((model.experts, model.hidden)) / np.sqrt(model.hidden)
        if layer in model.long:
            length = np.linalg.norm(rows[3])
            rows[3] = model.long_factor * length * mean_direction(model)
        if layer in model.zero:
            rows[2] = 0.0
        if layer in model.duplicate:
            rows[5] = rows[1]
        tensors[layout.weight.format(layer=layer)] = rows.astype(ml_dtypes.bfloat16)
        gain = 1.0 + 0.1 * generator.standard_normal(model.hidden)
        tensors[layout.norm.format(layer=layer)] = gain.astype(ml_dtypes.bfloat16)
        if layout.bias is not None:
            bias = 0.02 * generator.standard_normal(model.experts)
            if layer in model.duplicate:
                bias[5] = bias[1]
            tensors[layout.bias.format(layer=layer)] = bias.astype(np.float32)
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(dict(layout.config), indent=1), encoding="utf-8")
    return path


def synthetic_inputs(
    model: SyntheticModel, layer: int, num_tokens: int, num_sinks: int = 4, lean: float = 0.05
) -> Float32[np.ndarray, "tokens hidden"]:
    """Router inputs: directions that lean to a common mean, and a few tokens 1000 times as long.

    The long ones stand for attention sinks, which carry massive activations past the norm.
    """
    generator = np.random.default_rng([model.seed, layer, num_tokens])
    inputs = generator.standard_normal((num_tokens, model.hidden), dtype=np.float32)
    inputs += np.float32(lean * np.sqrt(model.hidden)) * mean_direction(model)
    inputs *= np.sqrt(np.float32(model.hidden)) / np.linalg.norm(inputs, axis=1, keepdims=True)
    sinks = np.linspace(0, num_tokens - 1, num_sinks).astype(int)
    inputs[sinks] *= np.float32(1000.0)
    return inputs


def write_tokens(
    path: Path,
    model: SyntheticModel,
    num_tokens: int,
    fingerprint: str = "",
    num_sinks: int = 4,
    lean: float = 0.05,
) -> Path:
    """A recording of :func:`synthetic_inputs` (times the gain, as the norm gives them)."""
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.router.load import load_routers

    routers = load_routers(open_checkpoint(path.parent / "model")).routers
    names = tuple(router.name for router in routers)
    token = np.arange(num_tokens)
    columns = TokenColumns(
        document=token // 128,
        position=(token % 128).astype(np.int32),
        token_id=np.full(num_tokens, -1, dtype=np.int32),
        domain=np.zeros(num_tokens, dtype=np.int16),
    )
    values = {
        router.name: synthetic_inputs(model, router.layer, num_tokens, num_sinks, lean)
        * router.gain
        for router in routers
    }
    with RecordingWriter(
        path,
        "router_input",
        names,
        checkpoint_name="synthetic",
        fingerprint=fingerprint,
        engine="synthetic",
        domains=("synthetic",),
    ) as writer:
        writer.append(columns, values)
    return path
