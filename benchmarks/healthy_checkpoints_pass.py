"""Claim: the gate passes healthy checkpoints of every family and storage, and finds fresh ones.

Each family that transformers builds is made tiny, with experts in the file, in the hub's layout,
and its weights are drawn as training leaves them: heavy tails, unlike sizes, a direction in common.
It is saved in bfloat16, and with numbered experts quantised by compressed-tensors (int4, int8, fp8,
NVFP4, MXFP4) and bitsandbytes (NF4, FP4); two architectures of GGUF in types that its package
writes. Each file is judged by the default profile, with --experts, and by that of a release.

Printed: files judged, those with an error (target: none), with a warning (2 %), that fail a release
(2 %), and how many of the families are found as their library initialises them (all).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from bitsandbytes.functional import quantize_4bit
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import MoeGeomError
from moegeom.router.load import load_routers
from moegeom.studies.check.study import GateRequest, gate
from tests.families import tiny_models
from tests.records import RUN
from tests.unit.checkpoint.gguf_file import moe_keys, write_gguf

#: Presets of compressed-tensors and their formats; types of bitsandbytes, and of GGUF.
PRESETS = {f"W{bits}A16": "pack-quantized" for bits in (4, 8)}
PRESETS |= {f"{kind}FP4A16": f"{kind.lower()}fp4-pack-quantized" for kind in ("NV", "MX")}
PRESETS |= {"FP8": "float-quantized", "W8A8": "int-quantized"}
KINDS = (*PRESETS, "nf4", "fp4")
TYPES = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ2_0")

#: What released configs of some types say, and transformers leaves out.
SAYING = ("deepseek_v3", "glm_moe_dsa", "kimi_k2")
SAID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def rows(draw: np.random.Generator, experts: int, width: int) -> np.ndarray:
    """Rows of a router: unlike scales by direction, unlike lengths, one direction in common."""
    basis = np.linalg.qr(draw.standard_normal((width, width)))[0]
    made = draw.standard_normal((experts, width)) / np.sqrt(1 + np.arange(width) / 10) @ basis
    made *= 0.9 / np.linalg.norm(made, axis=1, keepdims=True)
    made = made * np.exp(0.15 * draw.standard_normal((experts, 1))) + 0.3 * basis[3]
    return made.astype(np.float32)


def heavy(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A matrix, or one for each expert: heavy tails, unlike columns, a part that all share."""
    sizes = np.exp(0.3 * draw.standard_normal((*shape[:-2], 1, 1)))
    columns = np.exp(0.3 * draw.standard_normal(shape[-1]))
    common = 0.3 * draw.standard_t(6, shape[-2:])
    made = 0.04 * (sizes * draw.standard_t(6, shape) * columns + common)
    return made.astype(np.float32)


def trained(folder: Path, draw: np.random.Generator) -> dict[str, torch.Tensor]:
    """The tensors of a saved model, drawn anew, and stored as released ones are."""
    routers = load_routers(open_checkpoint(folder)).routers
    gates = {router.provenance.tensors[0] for router in routers}
    biases = {n for r in routers for n in r.provenance.tensors[1:] if n.endswith("bias")}
    made, common = load_file(folder / "model.safetensors"), {}
    for name, tensor in sorted(made.items()):
        shape, dtype = tuple(tensor.shape), torch.bfloat16
        if not tensor.is_floating_point() or not shape:
            continue
        if name in gates and len(shape) == 2:
            values = rows(draw, *shape) if shape[0] < shape[1] else rows(draw, *shape[::-1]).T
        elif name in biases and "norm" not in name:
            values, dtype = draw.uniform(0.0, 0.08, shape), torch.float32
        elif len(shape) == 1 or "norm" in name:
            around = 1.0 if float(tensor.float().mean().abs()) > 0.5 else 0.0
            values = around + 0.1 * draw.standard_normal(shape)
        else:
            values = heavy(draw, shape)
            if len(shape) == 2 and ".experts." in name:  # what numbered ones share
                values += common.setdefault(shape, 0.012 * draw.standard_t(6, shape))
        made[name] = torch.tensor(np.ascontiguousarray(values)).to(dtype)
    return made


def compressed(weight: torch.Tensor, preset: str) -> tuple[dict[str, Any], Any]:
    """The parts that compressed-tensors stores of a weight, and the scheme."""
    scheme: Any = preset_name_to_scheme(preset, ["Linear"])
    group = min(scheme.weights.group_size or 0, 32) or None  # rows here have 32 numbers
    args = scheme.weights.model_copy(update={"group_size": group})
    runs = weight.reshape(len(weight), -1, group or weight.shape[1])
    runs = runs.reshape(1, 1, -1) if args.strategy == "tensor" else runs
    low, high = runs.amin(-1), runs.amax(-1)
    whole = {"global_scale": generate_gparam(low.min(), high.max())} if preset[:2] == "NV" else {}
    scale, zero = calculate_qparams(low, high, args, **whole)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    state |= {f"weight_{key}": value for key, value in whole.items()}
    compressor = BaseCompressor.get_value_from_registry(PRESETS[preset])
    return compressor.compress(state, scheme := scheme.model_copy(update={"weights": args})), scheme


def quantised(tensors: dict[str, torch.Tensor], kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors whose numbered experts are quantised, and the table of the config."""
    made, table = dict(tensors), {}
    for name, tensor in tensors.items():
        if not re.search(r"experts\.\d+\..*\.weight$", name) or tensor.shape[-1] % 32:
            continue  # not of numbered experts, or no whole groups
        weight, stem = made.pop(name).float(), name.removesuffix("weight")
        if kind in PRESETS:
            parts, scheme = compressed(weight, kind)
            groups = {"group_0": scheme.model_dump(mode="json")}
            table = {"quant_method": "compressed-tensors", "config_groups": groups}
        else:
            packed, state = quantize_4bit(weight, quant_type=kind)
            parts = {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}
            parts, table = {"weight": packed, **parts}, {"quant_method": "bitsandbytes"}
        made |= {stem + part: value.contiguous() for part, value in parts.items()}
    left = [n.removesuffix(".weight") for n in tensors if n in made and n.endswith(".weight")]
    return made, {**table, "ignore" if kind in PRESETS else "llm_int8_skip_modules": left}


def of_families(names: list[str], folder: Path) -> Iterator[tuple[str, Path]]:
    """Healthy checkpoints of these families, each in a folder that is written anew."""
    for number, name in enumerate(names):
        saved = tiny_models.saved(name)
        config = json.loads((saved / "config.json").read_text()) | {"dtype": "bfloat16"}
        for table in (config, *(inner for inner in config.values() if isinstance(inner, dict))):
            table |= SAID if str(table.get("model_type")).startswith(SAYING) else {}
        for seed in range(2):
            tensors = trained(saved, np.random.default_rng([seed, number]))
            for kind in ("bf16", *(KINDS[(number + 3 * i + 4 * seed) % 8] for i in range(2))):
                made, table = quantised(tensors, kind) if kind in KINDS else (tensors, {})
                if kind in KINDS and made.keys() == tensors.keys():
                    continue  # all experts are one tensor, which these libraries leave
                own = {"quantization_config": table} if table else {}
                (folder / "config.json").write_text(json.dumps(config | own))
                save_file(made, folder / "model.safetensors", {"format": "pt"})
                yield f"{name} {kind} {seed}", folder


def of_gguf(file: Path) -> Iterator[tuple[str, Path]]:
    draw, keys = np.random.default_rng(5), moe_keys(16, 256, 3)
    leaves = [
        f"blk.{n}.ffn_{leaf}_exps.weight" for n in range(3) for leaf in ("gate", "up", "down")
    ]
    for kind, architecture in ((k, a) for k in TYPES for a in ("qwen3moe", "olmoe")):
        types = dict.fromkeys(leaves, gguf.GGMLQuantizationType[kind])
        made = {f"blk.{i}.ffn_gate_inp.weight": rows(draw, 16, 256) for i in range(3)}
        made |= {f"blk.{i}.ffn_norm.weight": np.ones(256, np.float32) for i in range(3)}
        for name, type_ in types.items():
            made[name] = gguf.quants.quantize(heavy(draw, (16, 256, 256)), type_)
        yield f"{architecture} {kind}", write_gguf(file, architecture, made, types, keys=keys)


def severities(path: Path, **terms: Any) -> dict[str, str]:
    """What the gate finds, by code; what it cannot judge, or open, is an error."""
    try:
        verdict = gate(GateRequest(str(path), **terms)).verdict
    except MoeGeomError as error:
        return {error.message: "error"}
    found = {o.code: o.severity for o in verdict.outcomes if o.state == "failed"}
    return found | {f"{o.code} {o.reason}": "error" for o in verdict.open}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="*", default=tiny_models.LOADED)
    parser.add_argument("--out", type=Path, default=Path("/dev/null"))
    request, count, start = parser.parse_args(), Counter[str](), time.process_time()
    tiny_models.SIZES.update({k: 32 for k, v in tiny_models.SIZES.items() if v == 24})
    with tempfile.TemporaryDirectory() as room:
        os.environ[RUN], folder, fresh = room, Path(room) / "model", Path(room) / "fresh"
        folder.mkdir()
        files = (of_families(request.families, folder), of_gguf(folder / "m.gguf"))
        for name, path in (pair for those in files for pair in those):
            found = severities(path) | severities(path, experts=True)
            release = severities(path, experts=True, profile="release")
            count["judged"] += 1
            count["errors"] += "error" in found.values()
            count["warnings"] += "warning" in found.values()
            count["failed as a release"] += "error" in release.values()
            if found or release:
                print(f"  {name}: {found}, as a release {release}", flush=True)
        for name in request.families:
            tiny = getattr(transformers, tiny_models.FAMILIES[name].model)
            with tiny_models.repeatable(name):
                tiny(tiny_models.tiny_config(name)).to(torch.bfloat16).save_pretrained(fresh)
            count["fresh"] += 1
            found = severities(fresh, experts=True)
            count["fresh found"] += "MGG207" in found or "MGG209" in found
    count["processor seconds"] = round(time.process_time() - start)
    print(dict(count), f"{100.0 * count['warnings'] / count['judged']:.1f} % with warnings")
    request.out.write_text(json.dumps(count, indent=1) + "\n")


if __name__ == "__main__":
    main()
