"""Listening to the routers of a model while it runs.

A router of transformers returns `(logits, routing weights, chosen)`. A forward hook sees that
tuple and the very tensor that the router was given, so nothing is computed a second time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter

Router = DeepseekV3TopkRouter | OlmoeTopKRouter


@dataclass(frozen=True)
class RouterTrace:
    """What one router was given and what it chose, one entry per call of the model."""

    num_experts: int
    inputs: list[Tensor] = field(default_factory=list)  # each [tokens, hidden]
    chosen: list[Tensor] = field(default_factory=list)  # each [tokens, top_k]

    def counts(self) -> Tensor:
        """How many slots each expert got, over all calls. Shape [experts]."""
        return torch.bincount(torch.cat(self.chosen).flatten(), minlength=self.num_experts)


@dataclass(frozen=True)
class Load:
    """How evenly the slots of one router are spread over its experts."""

    max_over_fair: float  # slots of the busiest expert / slots of an even spread; 1 is even
    num_starved: int  # experts with less than a tenth of the fair share, dead ones included
    num_dead: int  # experts with no slot at all


def router_layers(model: nn.Module) -> dict[int, Router]:
    """Layer index -> router, for every layer that has one."""
    layers = model.get_submodule("model.layers")
    found: dict[int, Router] = {}
    for layer, block in enumerate(layers.children()):
        for module in block.modules():
            if isinstance(module, Router):
                found[layer] = module
    return found


@contextmanager
def listen(model: nn.Module, *, keep_inputs: bool = False) -> Iterator[dict[int, RouterTrace]]:
    """While the context is open, every router call of `model` is added to the traces."""
    routers = router_layers(model)
    traces = {layer: RouterTrace(router.num_experts) for layer, router in routers.items()}
    handles = [
        router.register_forward_hook(_recorder(traces[layer], keep_inputs))
        for layer, router in routers.items()
    ]
    try:
        yield traces
    finally:
        for handle in handles:
            handle.remove()


def _recorder(trace: RouterTrace, keep_inputs: bool) -> Callable[..., None]:
    def record(_: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        _, _, chosen = output
        trace.chosen.append(chosen.detach().clone())
        if keep_inputs:
            # Some routers get [tokens, hidden], some [batch, position, hidden]; they flatten it
            # themselves in this order.
            trace.inputs.append(args[0].detach().flatten(0, -2).clone())

    return record


def measure_load(counts: Tensor) -> Load:
    """Load figures from the slots per expert. Shape [experts]."""
    fair = counts.sum().item() / len(counts)
    return Load(
        max_over_fair=counts.max().item() / fair,
        num_starved=int((counts < 0.1 * fair).sum().item()),
        num_dead=int((counts == 0).sum().item()),
    )
