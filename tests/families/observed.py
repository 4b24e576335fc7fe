"""What the routers of a model really did: their inputs, their choices and their weights.

Forward hooks on the router modules see one forward pass over random tokens. A router that the pass
does not reach (of a tower, of a second stack) is called by itself on random inputs: the module is
the oracle, wherever its input comes from.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode

from tests.families.tiny_models import Router, repeatable, routers_of

SEQUENCES, LENGTH, VOCABULARY = 2, 64, 160
#: Ids below are special tokens.
FIRST_ORDINARY = 3


@dataclass(frozen=True)
class Observed:
    """One router in one pass. ``-1`` in ``chosen``: dropped, for the expert was full (weight 0)."""

    module: str
    stack: str
    layer: int
    #: (tokens, hidden) float32; (tokens, k) int64 in the order of the library, and float32
    inputs: np.ndarray
    chosen: np.ndarray
    weights: np.ndarray
    #: (tokens,) int64, where the choice is looked up by token
    token_ids: np.ndarray | None = None


@dataclass(frozen=True)
class Call:
    inputs: torch.Tensor
    others: tuple[Any, ...]
    result: Any


#: (tokens, k) twice: the experts, and their weights.
Choice = tuple[torch.Tensor, torch.Tensor]


def observe(model: transformers.PreTrainedModel, name: str) -> tuple[Observed, ...]:
    """Every router of a model of this family, on the same random tokens at every call."""
    routers = tuple(routers_of(model, name))
    calls: dict[str, Call] = {}
    handles = [_record(router, calls) for router in routers]
    try:
        with repeatable(name):
            ids = torch.randint(FIRST_ORDINARY, VOCABULARY, (SEQUENCES, LENGTH))
            if run := FORWARD.get(name, _forward):
                run(model, ids)
            for router in routers:
                if router.name not in calls:
                    _call_alone(model, router)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(_observed(model, router, calls[router.name]) for router in routers)


def _record(router: Router, calls: dict[str, Call]) -> torch.utils.hooks.RemovableHandle:
    def hook(_: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        inputs, *others = (*arguments, *named.values())
        calls.setdefault(router.name, Call(_copied(inputs), tuple(others), _copied(result)))

    return router.module.register_forward_hook(hook, with_kwargs=True)


def _copied(value: Any) -> Any:
    """Blocks change what their routers gave them in place."""
    if isinstance(value, tuple):
        return tuple(_copied(part) for part in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _forward(model: Any, ids: torch.Tensor) -> None:
    if model.config.is_encoder_decoder:
        model(input_ids=ids, decoder_input_ids=ids.flip(0))
    else:
        model(input_ids=ids, use_cache=False)


#: How to run a part of a model that reads tokens; None where nothing does.
FORWARD: dict[str, Callable[[Any, torch.Tensor], None] | None] = {
    "dots3_note_vision_encoder": None,
    "qwen3_omni_moe": lambda model, ids: _forward(model.thinker, ids),
}


def _call_alone(model: transformers.PreTrainedModel, router: Router) -> None:
    hidden = max(weight.shape[-1] for weight in router.module.parameters())
    block, key, extra = _block_of(model, router), "e_score_correction_bias", {}
    if hasattr(block, key) and not hasattr(router.module, key):
        extra = {key: getattr(block, key)}  # some blocks own the bias and hand it over
    router.module(torch.randn(SEQUENCES * LENGTH, hidden), **extra)


def _block_of(model: transformers.PreTrainedModel, router: Router) -> Any:
    return model.get_submodule(router.name.rpartition(".")[0])


def _observed(model: transformers.PreTrainedModel, router: Router, call: Call) -> Observed:
    read = READERS.get(type(router.module).__name__, _plain)
    chosen, weights = read(_block_of(model, router), router.module, call)
    ids = next((x for x in call.others if _is_integer(x)), None)
    return Observed(
        router.name,
        router.stack,
        router.layer,
        call.inputs.flatten(0, -2).numpy(),
        chosen.flatten(0, -2).numpy(),
        weights.flatten(0, -2).numpy(),
        None if ids is None else ids.flatten().numpy(),
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64


def _plain(_: Any, __: Any, call: Call) -> Choice:
    """Nearly all give logits, weights and choices, in this order."""
    _, weights, chosen, *_ = call.result
    return chosen, weights


def _dbrx(block: Any, _: Any, call: Call) -> Choice:
    """The router gives logits; the choice is a method of its block."""
    weights, chosen = block.route_tokens_to_experts(call.result.flatten(0, -2))
    return chosen, weights


class _Watch(TorchFunctionMode):
    """The first argument and the result of every function of torch, by its name; the last call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[torch.Tensor, Any]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen[func.__name__] = (args[0], result) if args else (result, result)
        return result


def _doge(_: Any, module: Any, call: Call) -> Choice:
    """The block gives only logits: what it looks up in the tables of experts, and its softmax."""
    with torch.no_grad(), _Watch() as watch:
        module(call.inputs)
    chosen, _ = watch.seen["embedding"]
    _, weights = watch.seen["softmax"]  # divided by their sum in place, later
    return chosen, weights


def _jetmoe(_: Any, module: Any, call: Call) -> Choice:
    """The router gives the choices sorted by expert; this undoes the sorting."""
    order, _, sorted_weights, loads, _ = call.result
    experts = torch.repeat_interleave(torch.arange(len(loads)), torch.tensor(loads))
    chosen = torch.empty_like(order)
    chosen[order] = experts
    weights = torch.empty_like(sorted_weights)
    weights[order] = sorted_weights
    return chosen.unflatten(0, (-1, module.top_k)), weights.unflatten(0, (-1, module.top_k))


def _llama4(_: Any, module: Any, call: Call) -> Choice:
    """The router gives one weight for every expert: the sigmoid, or 0 where it was not chosen."""
    weights, chosen = call.result[0].topk(module.top_k)
    return chosen, weights


def _nllb(_: Any, __: Any, call: Call) -> Choice:
    """The first choice is a mask; the second is what else has a weight."""
    first, weights, _ = call.result
    second = weights * (1 - first)
    chosen, kept = [], []
    for mask in (first, second > 0):
        chosen.append(torch.where(mask.bool().any(-1), mask.int().argmax(-1), -1))
        kept.append((weights * mask).sum(-1))
    return torch.stack(chosen, -1), torch.stack(kept, -1)


def _flip(_: Any, __: Any, call: Call) -> Choice:
    """The choice is a mask, empty where the expert was full."""
    mask, weight, _ = call.result
    kept = mask.bool().any(-1, keepdim=True)
    return torch.where(kept, mask.argmax(-1, keepdim=True), -1), torch.where(kept, weight, 0.0)


def _zaya(_: Any, module: Any, call: Call) -> Choice:
    """The skip class, the last one, is written as expert 0 with weight exactly 0."""
    _, weights, chosen, _ = call.result
    return torch.where(weights == 0, module.num_experts, chosen), weights


#: By class of the router; all others are read by ``_plain``.
READERS: dict[str, Callable[[Any, Any, Call], Choice]] = {
    "DbrxRouter": _dbrx,
    "DogeCDMoE": _doge,
    "JetMoeTopKGating": _jetmoe,
    "Llama4Router": _llama4,
    "NllbMoeTop2Router": _nllb,
    "SwitchTransformersTop1Router": _flip,
    "ZayaRouter": _zaya,
}
