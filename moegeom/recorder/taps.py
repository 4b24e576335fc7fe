"""Hooks at the routers of a running model: what each one reads, and what it chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moegeom.core.errors import RecordingError
from moegeom.core.router import Router
from moegeom.recorder.model_store import ModelStore

#: router name, inputs [tokens, hidden], the model's own choice [tokens, top_k] if it can be seen.
Deliver = Callable[[str, torch.Tensor, torch.Tensor | None], None]


@dataclass(frozen=True, eq=False)
class Place:
    """Where a router may be listened to: the module with its weight, then those around it."""

    router: Router
    paths: tuple[str, ...]


def find_places(routers: Sequence[Router], store: ModelStore) -> tuple[Place, ...]:
    """The place of each router of ``store``, from the names of its tensors.

    Raises
    ------
    RecordingError
        When a router belongs to no module, or norms its own input.
    """
    weights = [store.own_name(router.provenance.tensors[0]) for router in routers]
    return tuple(
        _place(router, weight, [w for w in weights if w != weight], store)
        for router, weight in zip(routers, weights, strict=True)
    )


def _place(router: Router, weight: str, others: Sequence[str], store: ModelStore) -> Place:
    # a block with two routers reads tokens that one of them never sees
    paths = tuple(
        path
        for path in _around(weight)
        if not any(other.startswith(f"{path}.") for other in others)
    )
    if not paths:
        raise RecordingError(
            f"router {router.name}: its weight '{weight}' belongs to no module inside a layer, so "
            "that there is nothing to listen to.",
            "Record its inputs with moegeom.tokens.recording.writer.RecordingWriter.",
        )
    norm = router.norm.tensor if router.norm else ""
    if norm and store.own_name(norm).startswith(f"{paths[0]}."):
        raise RecordingError(
            f"router {router.name}: its module '{paths[0]}' norms its own input, so that the "
            "router's input cannot be seen from outside.",
            "Record the inputs of that norm (stage pre_norm) with RecordingWriter.",
        )
    return Place(router, paths)


def _around(tensor: str) -> Iterator[str]:
    """Modules around a tensor, innermost first, up to the layer, which reads something else."""
    path = tensor.rpartition(".")[0]
    while "." in path and not path.rpartition(".")[2].isdigit():
        yield path
        path = path.rpartition(".")[0]


class Tap:
    """Listens at one place while hooks are on; delivers once for each call of the block.

    Some modules are never called (their weight is used by the block around them), and some blocks
    choose what their router only scores. So the innermost module that is called gives the input,
    and the innermost whose result holds a choice gives that, once the outermost has returned.
    """

    def __init__(self, place: Place, model: torch.nn.Module, deliver: Deliver) -> None:
        self._place = place
        self._modules = [model.get_submodule(path) for path in place.paths]
        self._deliver = deliver
        self._running = 0
        self._input_depth: int | None = None
        self._inputs: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, torch.Tensor] = {}

    def hooks(self) -> Iterator[Any]:
        """Puts the hooks on; each handle takes one off."""
        for depth, module in enumerate(self._modules):
            yield module.register_forward_pre_hook(self._before(depth), with_kwargs=True)
            yield module.register_forward_hook(self._after(depth), always_call=True)

    def _before(self, depth: int) -> Callable[..., None]:
        def before(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._running += 1
            if self._input_depth not in (None, depth):
                return
            found = _first_floats((*arguments, *named.values()), self._place.router.hidden_size)
            if found is not None:
                # Blocks may change their input in place: what counts is what it is now.
                self._inputs[depth] = found.detach().reshape(-1, found.shape[-1]).clone()

        return before

    def _after(self, depth: int) -> Callable[..., None]:
        def after(module: Any, arguments: tuple[Any, ...], result: Any) -> None:
            self._running -= 1
            if result is not None and not self._chosen:
                self._choose(depth, result)
            if self._running == 0:
                self._finish(failed=result is None)

        return after

    @torch.no_grad()
    def _choose(self, depth: int, result: Any) -> None:
        block = self._modules[min(depth + 1, len(self._modules) - 1)]
        chosen = read_choice(self._modules[depth], block, result, self._place.router)
        if chosen is not None:
            self._chosen[depth] = chosen.detach().clone()

    def _finish(self, failed: bool) -> None:
        inputs, chosen = self._inputs, self._chosen
        self._inputs, self._chosen = {}, {}
        if failed or not inputs:
            return
        self._input_depth = min(inputs)
        choice = chosen[min(chosen)] if chosen else None
        self._deliver(self._place.router.name, inputs[self._input_depth], choice)


def _first_floats(values: tuple[Any, ...], width: int) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1:
            return value if value.shape[-1] == width else None
    return None


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
