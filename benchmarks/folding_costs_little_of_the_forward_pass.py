"""Claim: measuring the routers inside the process that runs the model costs little of its time.

Prints wall time with a ``RouterRecorder`` over that of the bare forward pass, in alternation in one
process: recording (each kind of ``keep``) and folding, for a sample model (tiny, so that the rest
of the pass is nearly nothing) and for a stack of layers of real width.

What folding costs does not all grow with the tokens: samples, the test of the first tokens and the
rows at the end cost the same for any number. So the processor time of folding alone, without a
forward pass, is told for two numbers of tokens beyond the samples: what a token more costs, over
the forward pass of a token, and what is left at none.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
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


def _folding_alone(model: Any, hidden: int, tokens: int) -> float:
    """Processor seconds of folding inputs of length ``sqrt(hidden)``, less those of the gates."""
    inputs = torch.nn.functional.rms_norm(torch.randn(_PIECE, hidden), (hidden,))
    gates = [layer.mlp.gate for layer in model.model.layers]
    ids = torch.zeros(1, _PIECE, dtype=torch.long)
    seconds = []
    for folds in (False, True):
        folder = Path(tempfile.mkdtemp())
        began = time.process_time()
        with ExitStack() as stack:
            recorder = folds and stack.enter_context(
                RouterRecorder(model, folder / "out", fold=True, num_tokens=tokens)
            )
            for _ in range(tokens // _PIECE):
                if recorder:
                    recorder.tokens(ids)
                for gate in gates:
                    gate(inputs)
        seconds.append(time.process_time() - began)
        shutil.rmtree(folder)
    return seconds[1] - seconds[0]


@torch.no_grad()
def _measure_growth(model: Any, hidden: int, repeats: int) -> None:
    """What a token and router more costs, over a token and layer of the forward pass."""
    num_layers, (few, many) = len(model.model.layers), _BEYOND_SAMPLES
    ids = torch.randint(0, 512, (1, _PIECE))
    model(input_ids=ids, use_cache=False)
    began = time.process_time()
    model(input_ids=ids, use_cache=False)
    forward = (time.process_time() - began) / _PIECE / num_layers
    _folding_alone(model, hidden, _PIECE)  # compiles
    best = [
        min(_folding_alone(model, hidden, tokens) for _ in range(repeats)) for tokens in (few, many)
    ]
    more = (best[1] - best[0]) / (many - few) / num_layers
    fixed = best[0] / num_layers - more * few
    print(
        f"  folding alone: a token more {more / forward:.4f} of its forward pass "
        f"({forward * 1e6:.0f} us a layer); {fixed:.2f} s a router for any number of tokens"
    )


#: Tokens of one forward pass, and numbers of tokens of which samples have no more than they hold.
_PIECE = 1024
_BEYOND_SAMPLES = 24 * _PIECE, 56 * _PIECE


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
    _measure_growth(model, arguments.hidden, arguments.repeats)


if __name__ == "__main__":
    main()
