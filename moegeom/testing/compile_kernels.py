"""``python -P -m moegeom.testing.compile_kernels``: compiles the kernels before they are needed.

For the image of a container, or a folder of ``NUMBA_CACHE_DIR`` that jobs share: boundary reports
and cells of small checkpoints of random numbers run once. What they compile is kept for this
version of moegeom, of Numba and of Python and this kind of processor; any other compiles its own.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

import moegeom
from moegeom.kernels.table import load_kernels

_HIDDEN, _EXPERTS = 32, 64

#: Straight boundaries, and curved ones between groups: by their type the other keys of a config.
_CONFIGS = {
    "qwen3_moe": {"num_experts": _EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "deepseek_v3": {
        "n_routed_experts": _EXPERTS,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
    },
}


def _write_checkpoint(folder: Path, kind: str) -> None:
    """A router of random rows in one layer, and the norm in front of it."""
    from ml_dtypes import bfloat16
    from safetensors.numpy import save_file

    rows = np.random.default_rng(0).standard_normal((_EXPERTS, _HIDDEN))
    prefix = "model.layers.0."
    tensors = {
        f"{prefix}mlp.gate.weight": rows.astype(bfloat16),
        f"{prefix}post_attention_layernorm.weight": np.ones(_HIDDEN, bfloat16),
    }
    if kind == "deepseek_v3":
        bias = np.linspace(-0.02, 0.02, _EXPERTS, dtype=np.float32)
        tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = bias
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": kind, "num_hidden_layers": 1, "hidden_size": _HIDDEN}
    config |= {"rms_norm_eps": 1e-6, "num_experts_per_tok": 8, "norm_topk_prob": True}
    (folder / "config.json").write_text(json.dumps(config | _CONFIGS[kind]), encoding="utf-8")


def compile_kernels() -> None:
    """Runs studies that need the kernels; those that are on disk already are only loaded."""
    token = np.arange(512)
    inputs = np.random.default_rng(1).standard_normal((len(token), _HIDDEN), dtype=np.float32)
    inputs /= np.sqrt((inputs**2).mean(axis=1, keepdims=True))
    tokens = {"text/0": inputs, "document": token // 128, "position": token % 128}
    with tempfile.TemporaryDirectory() as name:
        for kind in _CONFIGS:
            _write_checkpoint(Path(name) / kind, kind)
            moegeom.boundary_report(Path(name) / kind, tokens, stage="router_input")
        checkpoint = Path(name) / "qwen3_moe"
        moegeom.cells(checkpoint, subspace="random:3", out=Path(name) / "cells")
    # these tokens do not say what was chosen: nothing is compared with it
    chosen = np.zeros((1, 1), np.int32)
    load_kernels("cpu")["same_set"](chosen, chosen)


if __name__ == "__main__":
    compile_kernels()
