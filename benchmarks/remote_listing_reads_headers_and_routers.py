"""Claim: routers of a checkpoint on a server cost their bytes and a few seconds of waiting.

Makes a checkpoint of 163 shards, each with a router, its norm and experts, and serves it from this
machine with 50 ms before every answer. Prints bytes that the server sent over (index + config +
headers + routers + norms), requests, how many were under way at the same time, and the time over
the least that 8 requests at a time can take; then the same from the cache.

Targets: bytes <= 1.05, at most 8 requests at a time, time <= 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.remote.url import RemoteOptions
from moegeom.router.load import load_routers
from tests.unit.checkpoint.remote_server import Log, serve

SHARDS, HIDDEN, EXPERTS = 163, 512, 64

CONFIG = {
    "model_type": "olmoe",
    "hidden_size": HIDDEN,
    "num_hidden_layers": SHARDS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-5,
}


def write_checkpoint(folder: Path) -> int:
    """Write the checkpoint; the bytes that a reader of its routers needs."""
    generator = np.random.default_rng(0)
    expert = np.zeros((HIDDEN, 1024), ml_dtypes.bfloat16)
    weight_map, needed = {}, 0
    for layer in range(SHARDS):
        prefix, name = f"model.layers.{layer}", f"model-{layer:05d}-of-{SHARDS:05d}.safetensors"
        router = generator.standard_normal((EXPERTS, HIDDEN)).astype(ml_dtypes.bfloat16)
        gain = np.ones(HIDDEN, ml_dtypes.bfloat16)
        tensors = {
            f"{prefix}.mlp.experts.0.up_proj.weight": expert,
            f"{prefix}.mlp.gate.weight": router,
            f"{prefix}.post_attention_layernorm.weight": gain,
        }
        save_file(tensors, folder / name)
        with (folder / name).open("rb") as shard:
            needed += 8 + int.from_bytes(shard.read(8), "little") + router.nbytes + gain.nbytes
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return needed + sum(path.stat().st_size for path in folder.glob("*.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=0.05, help="Seconds before every answer.")
    latency = parser.parse_args().latency
    with tempfile.TemporaryDirectory() as name, serve() as site:
        folder = Path(name) / "model"
        folder.mkdir()
        needed = write_checkpoint(folder)
        site.add_folder(folder, "/model")
        site.latency_s = latency
        options = RemoteOptions(cache_folder=None)
        cached = replace(options, cache_folder=Path(name) / "cache")
        for title, chosen in {"": options, "filling the cache": cached, "cached": cached}.items():
            site.log = Log()
            started = time.perf_counter()
            routers = load_routers(open_checkpoint(f"{site.url}/model", chosen))
            seconds = time.perf_counter() - started
            least = len(site.log.requests) * latency / chosen.num_parallel
            print(
                f"{title or 'no cache'}: {len(routers.routers)} routers, "
                f"{len(site.log.requests)} requests, at most {site.log.most_in_flight} at a time, "
                f"bytes over needed {site.log.bytes_sent / needed:.4f}, "
                f"{seconds:.1f} s, {seconds / least:.1f} times the least"
            )


if __name__ == "__main__":
    main()
