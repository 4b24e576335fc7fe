"""Claim: explain takes seconds of one core at 4 routers (2048, 64, 8) and 16,384 tokens.

Prints, for each family and each way in which B differs, the processor time of `explain`, the time
by the clock, which routers share out among the cores, and its verdict: noise on the inputs, int8
weights (ids alone are recorded), and noise where B recorded its inputs too. The least of the
repeats, after a round that compiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.synthetic import SyntheticModel, write_checkpoint, write_tokens
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.router import Router
from moegeom.engine.choice import chosen_by, logits_of
from moegeom.engine.prepared import prepare
from moegeom.geometry.number_formats import Code, decoded
from moegeom.kernels.table import load_kernels
from moegeom.router.load import load_routers
from moegeom.studies.explain.study import ExplainRequest, explain
from moegeom.tokens.open import open_tokens
from moegeom.tokens.recording.writer import RecordingWriter

TOKENS = 16_384

#: Noise on the inputs of B, over their rms: two roundings to bfloat16.
NOISE = 0.0035

INT8 = Code("int8", 1, 0, 127.0)


def _write_b(
    path: Path, a: Path, routers: Mapping[str, Router], noise: float, keeps_inputs: bool
) -> Path:
    """What these routers choose on A's inputs with noise, and the inputs if they are kept."""
    source, random, kernels = open_tokens(str(a)), np.random.default_rng(0), load_kernels("cpu")
    values, chosen = {}, {}
    for name, router in routers.items():
        read = source.read_values(name, 0, TOKENS)
        rms = np.sqrt((read**2).mean(axis=1, keepdims=True))
        values[name] = read + noise * rms * random.standard_normal(read.shape, np.float32)
        prepared = prepare(router)
        logits = logits_of(prepared, values[name])
        assert logits is not None
        chosen[name] = chosen_by(prepared, logits, kernels)
    stage = "router_input" if keeps_inputs else "ids"
    domains = source.facts.domains
    with RecordingWriter(path, stage, tuple(routers), domains=domains, dtype="float32") as writer:
        writer.append(source.read_columns(0, TOKENS), values if keeps_inputs else None, chosen)
    return path


def _seconds(request: ExplainRequest) -> tuple[float, float, str]:
    """Seconds of the processor, of all threads, and of the clock; and the verdict."""
    processor, clock = time.process_time(), time.perf_counter()
    verdict = explain(request).verdict
    return time.process_time() - processor, time.perf_counter() - clock, verdict.cause


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    for family in ("qwen3_moe", "deepseek_v3"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shape = SyntheticModel(family, 2048, 64, 8, 4)
            model = write_checkpoint(folder / "model", shape)
            found = load_routers(open_checkpoint(model))
            a = write_tokens(folder / "a", shape, TOKENS, fingerprint=found.fingerprint)
            own = {router.name: router for router in found.routers}
            coded = {
                name: dataclasses.replace(
                    router, weight=decoded(router.weight.astype(np.float32), INT8)
                )
                for name, router in own.items()
            }
            runs = {
                "noise, ids of B": _write_b(folder / "noise", a, own, NOISE, False),
                "int8 weights, ids of B": _write_b(folder / "int8", a, coded, 0.0, False),
                "noise, inputs of both": _write_b(folder / "inputs", a, own, NOISE, True),
            }
            for words, b in runs.items():
                request = ExplainRequest(checkpoint=str(model), tokens=str(a), run_b=str(b))
                taken = [_seconds(request) for _ in range(repeats + 1)][1:]
                processor, clock, causes = zip(*taken, strict=True)
                said = f"{min(processor):.1f} s of the processor, {min(clock):.1f} s by the clock"
                print(f"{family}, {words}: {said}, {causes[0]}", flush=True)


if __name__ == "__main__":
    main()
