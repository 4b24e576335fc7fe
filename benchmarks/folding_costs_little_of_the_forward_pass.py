"""Claim: measuring the routers inside the process that runs the model costs little of its time.

Prints wall time with a ``RouterRecorder`` over that of the bare forward pass, in alternation in one
process: recording (each kind of ``keep``) and folding, for a sample model (tiny, so that the rest
of the pass is nearly nothing) and for a stack of layers of real width. What folding does once per
router, at the end, is a figure of its own: it does not grow with the tokens.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM

from moegeom.recorder import RouterRecorder

SAMPLE = Path(__file__).parents[1] / "sample_ckpts" / "olmoe-balanced" / "step_1500"


def _stack(layers: int, hidden: int) -> Any:
    """OLMoE's own width, 64 experts, 8 of them chosen, with a small vocabulary."""
    config = OlmoeConfig(
        hidden_size=hidden,
        intermediate_size=hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
        vocab_size=512,
    )
    return OlmoeForCausalLM(config).eval()


def _forward(model: Any, batches: list[torch.Tensor], announce: Callable[..., None]) -> float:
    started = time.perf_counter()
    for ids in batches:
        announce(ids)
        model(input_ids=ids, use_cache=False)
    return time.perf_counter() - started


def _run(model: Any, batches: list[torch.Tensor], options: dict[str, Any] | None) -> list[float]:
    """Seconds of the passes, and with a recorder also those until the block has ended."""
    if options is None:
        return [_forward(model, batches, lambda ids: None)]
    folder = Path(tempfile.mkdtemp())
    try:
        started = time.perf_counter()
        with RouterRecorder(model, folder / "out", **options) as recorder:
            passes = _forward(model, batches, recorder.tokens)
        return [passes, time.perf_counter() - started]
    finally:
        shutil.rmtree(folder)


@torch.no_grad()
def _measure(what: str, model: Any, batches: list[torch.Tensor], repeats: int) -> None:
    tokens = sum(ids.numel() for ids in batches)
    kinds: dict[str, dict[str, Any] | None] = {
        "bare": None,
        "keep ids": {"keep": "ids"},
        "keep logits": {"keep": "logits"},
        "keep hidden": {"keep": "hidden"},
        "fold": {"fold": True, "num_tokens": tokens},
    }
    best: dict[str, list[float]] = {}
    for _ in range(repeats + 1):  # the first round compiles
        for name, options in kinds.items():
            found = _run(model, batches, options)
            best[name] = [min(pair) for pair in zip(found, best.get(name, found), strict=True)]
    bare = best["bare"][0]
    print(f"{what}: {tokens} tokens, bare forward pass {bare:.2f} s")
    for name, found in best.items():
        if name != "bare":
            print(
                f"  {name:<12} passes over bare {found[0] / bare:.3f}, "
                f"until the block has ended {found[1] / bare:.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=16)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    sample = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32).eval()
    short = list(torch.randint(0, 256, (64, 4, 128), generator=generator))
    _measure("sample (64, 16, 4), 3 layers", sample, short, arguments.repeats)
    long = list(torch.randint(0, 512, (arguments.batches, 1, 512), generator=generator))
    model = _stack(arguments.layers, arguments.hidden)
    _measure(
        f"stack ({arguments.hidden}, 64, 8), {arguments.layers} layers",
        model,
        long,
        arguments.repeats,
    )


if __name__ == "__main__":
    main()
