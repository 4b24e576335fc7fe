"""The model's own choice, read from what a router module gave back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from moegeom.core.router import Router

#: module, the module that holds it, its result, the router: experts [tokens, top_k], or None.
Reader = Callable[[torch.nn.Module, torch.nn.Module, Any, Router], torch.Tensor | None]


def read_choice(
    module: torch.nn.Module, block: torch.nn.Module, result: Any, router: Router
) -> torch.Tensor | None:
    """Experts [tokens, top_k] in the model's own order, or None where ``result`` holds none.

    ``block`` is the module that holds ``module``. Nothing is waited for: on a device the tensor
    may still be under way.
    """
    read = READERS.get(type(module).__name__, _listed_choice)
    return read(module, block, result, router)


def _listed_choice(
    module: torch.nn.Module, block: torch.nn.Module, result: Any, router: Router
) -> torch.Tensor | None:
    """The integers among the results: top_k for each token."""
    top_k = router.rule.top_k
    for tensor in _tensors(result):
        is_integer = not (tensor.is_floating_point() or tensor.is_complex())
        if is_integer and tensor.dtype != torch.bool and tensor.ndim and tensor.shape[-1] == top_k:
            return tensor.reshape(-1, top_k)
    return None


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _tensors(part)
    elif isinstance(result, dict):
        yield from _tensors(tuple(result.values()))


def _dbrx(module: torch.nn.Module, block: Any, result: Any, router: Router) -> torch.Tensor | None:
    """The router gives logits; the choice is a method of its block."""
    _, chosen = block.route_tokens_to_experts(result.flatten(0, -2))
    return chosen.reshape(-1, router.rule.top_k)


def _jetmoe(
    module: torch.nn.Module, block: torch.nn.Module, result: Any, router: Router
) -> torch.Tensor | None:
    """The choices come sorted by expert: ``order`` says which slot each one was."""
    order, _, _, loads, _ = result
    experts = torch.repeat_interleave(torch.arange(len(loads)), torch.as_tensor(loads))
    chosen = torch.empty_like(order)
    chosen[order] = experts.to(order.device)
    return chosen.reshape(-1, router.rule.top_k)


def _llama4(
    module: torch.nn.Module, block: torch.nn.Module, result: Any, router: Router
) -> torch.Tensor | None:
    """One weight for every expert: 0 where it was not chosen."""
    return result[0].reshape(-1, router.num_experts).topk(router.rule.top_k).indices


def _after_capacity(
    module: torch.nn.Module, block: torch.nn.Module, result: Any, router: Router
) -> torch.Tensor | None:
    """What is given back lacks the tokens that full experts dropped: that is not the choice."""
    return None


#: By class of the module; all others list their choice among their results.
READERS: dict[str, Reader] = {
    "DbrxRouter": _dbrx,
    "JetMoeTopKGating": _jetmoe,
    "Llama4Router": _llama4,
    "NllbMoeTop2Router": _after_capacity,
    "SwitchTransformersTop1Router": _after_capacity,
}
