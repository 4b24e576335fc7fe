"""Claim: opening a checkpoint costs its headers and its routers, in bytes and in time.

Makes a checkpoint of the shape of DeepSeek-V3: 58 MoE layers and one for multi-token prediction,
256 experts each, hidden size 7168, about 91 000 tensors in 160 shards. Routers, selection biases
and norms are really there; everything else is a hole in a sparse file, so that 690 GB take 0.3 GB.

Prints bytes read over (index + config + headers of the shards that hold a router + routers, biases
and norms), and processor time over (json.loads of the same index and headers + reading the same
tensors + upcast), the two sides in alternation, the least of each. The fingerprint of the routers
is the hash of the same bytes: a second figure has that hash on both sides.

Targets (docs/benchmarks.md): bytes <= 1.02, time <= 1.3.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.load import load_routers

HIDDEN, EXPERTS, SHARDS = 7168, 256, 160
NUM_LAYERS, FIRST_MOE = 61, 3

#: What a router reader needs; everything else in the checkpoint is a hole.
NEEDED = re.compile(
    r"(mlp\.gate\.(weight|e_score_correction_bias)|post_attention_layernorm\.weight)$"
)

CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": FIRST_MOE,
    "moe_layer_freq": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-6,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}

SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}

Tensor = tuple[str, str, tuple[int, ...]]


def _quantised(name: str, *shape: int) -> Iterator[Tensor]:
    yield f"{name}.weight", "F8_E4M3", shape
    yield f"{name}.weight_scale_inv", "F32", tuple(-(-size // 128) for size in shape)


def _feed_forward(name: str, width: int) -> Iterator[Tensor]:
    for projection in ("gate_proj", "up_proj"):
        yield from _quantised(f"{name}.{projection}", width, HIDDEN)
    yield from _quantised(f"{name}.down_proj", HIDDEN, width)


def _attention(name: str) -> Iterator[Tensor]:
    yield from _quantised(f"{name}.q_a_proj", 1536, HIDDEN)
    yield f"{name}.q_a_layernorm.weight", "BF16", (1536,)
    yield from _quantised(f"{name}.q_b_proj", 128 * 192, 1536)
    yield from _quantised(f"{name}.kv_a_proj_with_mqa", 576, HIDDEN)
    yield f"{name}.kv_a_layernorm.weight", "BF16", (512,)
    yield from _quantised(f"{name}.kv_b_proj", 128 * 256, 512)
    yield from _quantised(f"{name}.o_proj", HIDDEN, 128 * 128)


def _tensors() -> Iterator[Tensor]:
    yield "model.embed_tokens.weight", "BF16", (129280, HIDDEN)
    for layer in range(NUM_LAYERS + 1):
        prefix = f"model.layers.{layer}"
        yield from _attention(f"{prefix}.self_attn")
        if layer < FIRST_MOE:
            yield from _feed_forward(f"{prefix}.mlp", 18432)
        else:
            yield f"{prefix}.mlp.gate.weight", "BF16", (EXPERTS, HIDDEN)
            yield f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (EXPERTS,)
            yield from _feed_forward(f"{prefix}.mlp.shared_experts", 2048)
            for expert in range(EXPERTS):
                yield from _feed_forward(f"{prefix}.mlp.experts.{expert}", 2048)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", "BF16", (HIDDEN,)
    yield "model.norm.weight", "BF16", (HIDDEN,)
    yield "lm_head.weight", "BF16", (129280, HIDDEN)


@dataclass
class Shape:
    """What the checkpoint holds and the least that must be read of it.

    ``parts`` are the tensors that a router reader needs: file, offset, bytes, stored dtype.
    """

    num_tensors: int = 0
    bytes_total: int = 0
    headers: dict[str, int] = field(default_factory=dict)
    parts: list[tuple[str, int, int, str]] = field(default_factory=list)

    @property
    def needed_bytes(self) -> int:
        return sum(self.headers.values()) + sum(size for _, _, size, _ in self.parts)


def write_checkpoint(folder: Path) -> Shape:
    """The sparse checkpoint; its ``headers`` are those of the shards that hold a router's parts."""
    tensors = list(_tensors())
    total = sum(SIZES[dtype] * int(np.prod(shape)) for _, dtype, shape in tensors)
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if filled >= total * len(shards) / SHARDS:
            shards.append([])
        shards[-1].append(tensor)
        filled += SIZES[tensor[1]] * int(np.prod(tensor[2]))
    found = Shape(num_tensors=len(tensors))
    generator = np.random.default_rng(0)
    weight_map = {}
    for number, content in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys((tensor[0] for tensor in content), name)
        _write_shard(folder / name, content, generator, found)
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return found


def _write_shard(path: Path, content: list[Tensor], generator, found: Shape) -> None:
    header, offset = {}, 0
    for name, dtype, shape in content:
        end = offset + SIZES[dtype] * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dtype, shape in content:
            if not NEEDED.search(name) or _is_dense(name):
                continue
            begin, end = header[name]["data_offsets"]
            values = generator.standard_normal(shape, dtype=np.float32) * np.float32(0.01)
            kind = np.float32 if dtype == "F32" else ml_dtypes.bfloat16
            file.seek(start + begin)
            file.write(values.astype(kind).tobytes())
            found.parts.append((path.name, start + begin, end - begin, dtype))
            found.headers[path.name] = start
        file.truncate(start + offset)
    found.bytes_total += start + offset


def _is_dense(name: str) -> bool:
    return int(name.split(".")[2]) < FIRST_MOE


def bare(folder: Path, shape: Shape, with_hash: bool) -> None:
    """The work that no reader can avoid: parse index and headers, read the tensors, upcast."""
    json.loads((folder / "config.json").read_bytes())
    json.loads((folder / "model.safetensors.index.json").read_bytes())
    for name, size in shape.headers.items():
        with (folder / name).open("rb", buffering=0) as file:
            json.loads(file.read(size)[8:])
    kept = []
    for name, offset, size, dtype in shape.parts:
        with (folder / name).open("rb", buffering=0) as file:
            file.seek(offset)
            raw = file.read(size)
        if with_hash:
            hashlib.sha256(raw).digest()
        kind = np.float32 if dtype == "F32" else ml_dtypes.bfloat16
        kept.append(np.frombuffer(raw, kind).astype(np.float32))


@dataclass(frozen=True)
class Seconds:
    """Least processor time of all threads, and least time on the clock."""

    processor: float = np.inf
    clock: float = np.inf

    def least(self, work: Callable[[], object]) -> Seconds:
        """The lesser of these and those of one more run."""
        gc.collect()
        started, at = time.process_time(), time.perf_counter()
        work()
        processor, clock = time.process_time() - started, time.perf_counter() - at
        return Seconds(min(self.processor, processor), min(self.clock, clock))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = write_checkpoint(folder)
        routers = load_routers(open_checkpoint(folder))
        files = ("model.safetensors.index.json", "config.json")
        needed = shape.needed_bytes + sum((folder / file).stat().st_size for file in files)
        print(
            f"checkpoint: {shape.num_tensors} tensors, {SHARDS} shards, "
            f"{shape.bytes_total / 1e9:.0f} GB; {len(routers.routers)} routers, "
            f"{len(shape.headers)} shards touched, {needed / 1e6:.1f} MB needed"
        )
        print(f"bytes read over needed: {routers.bytes_read / needed:.4f}")
        del routers
        work = {
            "open": lambda: load_routers(open_checkpoint(folder)),
            "bare": lambda: bare(folder, shape, with_hash=False),
            "bare + hash": lambda: bare(folder, shape, with_hash=True),
        }
        best = dict.fromkeys(work, Seconds())
        for _ in range(repeats):
            for name, run in work.items():
                best[name] = best[name].least(run)
        opened, least, hashed = best.values()
        print(f"time on the clock over bare: {opened.clock / least.clock:.2f}")
        print(f"processor time over bare: {opened.processor / least.processor:.2f}")
        print(f"processor time over bare + hash: {opened.processor / hashed.processor:.2f}")
        print(f"(bare {least.clock:.2f} s, the hash {hashed.clock - least.clock:.2f} s)")


if __name__ == "__main__":
    main()
