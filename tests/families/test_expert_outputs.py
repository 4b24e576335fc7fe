"""Oracle: what the expert blocks of transformers give, for every family that it can build.

A tiny random model is saved as the hub has it; moegeom reads routers and experts from the file and
computes routed and shared outputs of random inputs; the block of the model gets the same inputs.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError
from moegeom.core.router import Router
from moegeom.router.expert_functions import open_expert_functions, open_shared_experts
from moegeom.router.family import families
from tests.by_day import by_day
from tests.families.test_families_against_transformers import families_of, routed
from tests.families.tiny_models import (
    BY_DAY,
    LISTED,
    LOADED,
    OWN_NORM,
    model_of,
    read,
    repeatable,
    routers_of,
    saved,
)

TOKENS, HIDDEN = 96, 64

#: Experts whose outputs do not follow from the router input, and shared experts that are not read,
#: by family, with the words of the refusal.
REFUSED = {("jetmoe", "attention"): "attention, which mixes tokens"}
SHARED_REFUSED = {"inkling": "weighted by the router", "inkling_text": "weighted by the router"}

#: Shared experts are halved with the routed ones where the strategy is to average.
HALVED = {"cohere2_moe__sigmoid"}

SHARED = re.compile(r"(?:.*\.)?shared?_(?:experts?|mlp)")


def inputs_of(name: str) -> torch.Tensor:
    with repeatable(name):
        return torch.randn(1, TOKENS, HIDDEN)


def _experts(block: Any, y: torch.Tensor, chosen: Any, weights: Any) -> torch.Tensor:
    return block.experts(y[0], torch.tensor(chosen, dtype=torch.int64), weights.float())


def _behind_own_norm(block: Any, y: torch.Tensor, chosen: Any, weights: Any) -> torch.Tensor:
    """The layer is the block; its experts read another norm of the state."""
    state = block.pre_feedforward_layernorm_2(y)
    return _experts(block, state, chosen, weights)


def _nllb(block: Any, y: torch.Tensor, chosen: Any, weights: Any) -> torch.Tensor:
    """One by one: the block takes the mask of its router for numbers of experts."""
    total = torch.zeros(TOKENS, HIDDEN)
    for expert in range(block.experts.num_experts):
        one = block.experts[f"expert_{expert}"](y[0])
        total += (weights * torch.tensor(chosen == expert)).sum(1, keepdim=True) * one
    return total.float() * (1.0 - block.experts.moe_token_dropout)


#: Blocks whose sum of experts is not seen at their end: a norm stands behind it, or worse.
OWN: dict[str, Callable[[Any, torch.Tensor, Any, torch.Tensor], torch.Tensor]] = {
    "axk1": _experts,
    "diffusion_gemma": _behind_own_norm,
    "gemma4": _behind_own_norm,
    "gemma4_text": _behind_own_norm,
    "nllb_moe": _nllb,
    "nllb_moe__bias_cap": _nllb,
}


def of_block(block: Any, name: str, y: torch.Tensor) -> torch.Tensor:
    """The output of the block less that of its shared experts, and less a bias behind the sum."""
    seen: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _, __, out, path=path: seen.update({path: out.clone()}))
        for path, module in block.named_children()
        if SHARED.fullmatch(path) or path == "shared_expert_gate"
    ]
    found = block(y)
    for handle in handles:
        handle.remove()
    found = (found[0] if isinstance(found, tuple) else found).reshape(TOKENS, HIDDEN)
    gate = torch.sigmoid(seen.pop("shared_expert_gate", torch.full((1,), torch.inf)))
    for shared in seen.values():
        found = found - (gate * shared).reshape(TOKENS, HIDDEN) * (0.5 if name in HALVED else 1.0)
    return found - getattr(block, "bias", 0.0)


def near(mine: np.ndarray, theirs: torch.Tensor) -> None:
    expected = theirs.double().numpy()
    np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def shared_of(model: Any, path: str, name: str, y: torch.Tensor) -> torch.Tensor | None:
    layer = re.match(r"(?:.*\.)?(?:layers|blocks|block)\.\d+\.", path)
    assert layer
    modules = dict(model.named_modules())
    found = [p for p in modules if p.startswith(layer[0]) and SHARED.fullmatch(p) and modules[p]]
    if not found:
        return None
    out = modules[found[0]](y)
    gate = modules.get(found[0] + "_gate")
    out = out if gate is None else torch.sigmoid(gate(y)) * out
    return out.reshape(TOKENS, HIDDEN) * (0.5 if name in HALVED else 1.0)


def opened(name: str) -> list[tuple[Any, Router]]:
    """The last router of every stack: where it is in the model, and as it is read."""
    routers = {(r.slot or r.stack, r.layer): r for r in read(name).routers}
    routers |= {("text", r.layer): r for r in routers.values() if r.slot == "mlp"}
    last = {place.stack: place for place in routers_of(model_of(name), name)}
    stacks = {"encoder": "decoder"} if name == "diffusion_gemma" else {}
    return [
        (place, routers[stacks.get(place.stack, place.stack), place.layer])
        for place in last.values()
    ]


#: Ways to lay out experts that files of families say nothing of: names and shapes do.
LAYOUTS = {
    "gate_proj, up_proj, down_proj of each expert": "olmoe",
    "w1, w3, w2 of each expert": "mixtral",
    "one transposed matrix of two halves": "llama4_text",
    "the same with biases, cut off": "openai_privacy_filter",
    "fc1 and fc2 of all experts, transposed": "aria_text",
    "input_linear and output_linear of all experts": "granitemoe",
    "shared experts outside of the block": "granitemoeshared",
    "a number that gates the shared expert": "qwen2_moe",
}


@pytest.mark.parametrize("name", by_day(LOADED, {*BY_DAY, *LAYOUTS.values()}))
def test_experts_of_a_file_give_what_the_block_gives(name):
    model, y, store = model_of(name), inputs_of(name), open_checkpoint(saved(name))
    for place, router in opened(name):
        if reason := REFUSED.get((name, router.slot)):
            with pytest.raises(RouterError, match=reason):
                open_expert_functions(store, router)
            continue
        block = model.get_submodule(place.name.rpartition(".")[0])
        choice, weights = routed(router, y[0].numpy(), name in OWN_NORM)
        inputs = y[0].double().numpy()
        if name in OWN_NORM:  # what the router norms for itself
            assert router.norm is not None
            assert router.gain is not None
            scale = np.sqrt((inputs**2).mean(axis=1, keepdims=True) + router.norm.eps)
            inputs = inputs / scale * router.gain
        experts, before = open_expert_functions(store, router), store.bytes_read
        experts.tensors.read(0)
        assert store.bytes_read - before == experts.bytes_of([0]) > 0
        with torch.no_grad():
            own = OWN.get(name)
            if own is None:
                expected = of_block(block, name, y)
            else:
                expected = own(block, y, choice.chosen, torch.tensor(weights))
            mine = experts.mixed(inputs, choice.chosen, weights)
            if router.rule.capacity is not None:  # experts that were full dropped the token
                mine[(expected == 0.0).all(dim=1).numpy()] = 0.0
            near(mine, expected)
            if reason := SHARED_REFUSED.get(name):
                with pytest.raises(RouterError, match=reason):
                    open_shared_experts(store, router)
                continue
            of_model = shared_of(model, place.name, name, y)
            shared = open_shared_experts(store, router)
            assert (of_model is None) == (shared is None)
            if of_model is not None and shared is not None:
                near(shared.apply(inputs), of_model)


def test_the_page_counts_every_family_once():
    held = families_of(LOADED)
    listed = families_of(LISTED) - held
    gguf = {name for name in families() if name.startswith("gguf_")}
    others = set(families()) - held - listed - gguf
    page = (Path(__file__).resolve().parents[2] / "docs/outputs.md").read_text("utf-8")
    table = re.findall(r"^\| ([^|]+) \| (\d+) \|", page, re.MULTILINE)
    counts = {what: int(number) for what, number in table}
    assert counts.pop("of transformers") == len(held)
    assert counts.pop("of GGUF files") == len(gguf)
    named = {name for what in counts for name in what.split(", ")}
    assert named == listed | others
    assert sum(counts.values()) == len(named)
    assert {name for name, _ in REFUSED} | SHARED_REFUSED.keys() | OWN.keys() <= set(LOADED)
