"""Replaces the routers of a model and leaves its experts unchanged."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from moegeom.core.digest import digest_of
from moegeom.core.errors import RouterError, UsageError
from moegeom.core.router import parse_layers

#: Names of a router beside ``experts``.
_NAMES = ("gate", "router")

#: What hooks hang in, by attribute of a module.
_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_pre_hooks",
    "_backward_hooks",
)  # fmt: skip

#: New rows [experts, hidden], or a module that takes the old one's place.
Replacement = torch.Tensor | np.ndarray | nn.Module


@dataclass(frozen=True)
class _Block:
    """A block with experts: its layer and path, and the name of its router."""

    layer: int
    path: str
    module: nn.Module
    name: str

    @property
    def router(self) -> nn.Module:
        return getattr(self.module, self.name)


def replace_router(
    model: nn.Module,
    new: Replacement | Callable[[int, nn.Module], Replacement],
    layers: str | Iterable[int] | None = None,
    keep_experts: bool = True,
) -> nn.Module:
    """Exchanges the routers of a loaded model with experts; changes and returns it.

    ``new`` is a matrix of rows, which takes the place of the old rows and leaves the rule as it is,
    or a module, of which each layer gets a copy, or a function from layer and old router to either.
    A module gets the dtype, device and mode of the old one, its hooks, whose handles stay valid,
    and every buffer of the same name and shape (a selection bias, counts of load). It must give for
    two tokens of zeros what the old one gives: as many tensors, of the same kinds and sizes but for
    the number of experts per token.

    With ``keep_experts`` all other tensors of each block are hashed before and after: experts,
    shared experts, their gates.

    Raises
    ------
    UsageError
        If there is no such router, or the new one does not fit.
    RouterError
        If a tensor of the experts is not bit for bit what it was; the old routers are back then.
    """
    blocks = list(_blocks(model, layers))
    frozen = blocks if keep_experts else []
    before = {block.path: expert_hashes(block.module, block.name) for block in frozen}
    old = {block.path: (block.router, _rows(block)) for block in blocks}
    try:
        for block in blocks:
            _exchange(block, new)
        for block in frozen:
            _refuse_changed(block, before[block.path])
    except (UsageError, RouterError):
        for block in blocks:
            router, rows = old[block.path]
            setattr(block.module, block.name, router)
            _write(router, rows)
        raise
    return model


def expert_hashes(block: nn.Module, router: str = "gate") -> dict[str, str]:
    """A hash of every parameter and buffer of a block by its name, but for those of its router."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    return {name: _digest(value) for name, value in tensors if name.split(".")[0] != router}


def _digest(value: torch.Tensor) -> str:
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return digest_of(str(value.dtype), tuple(value.shape), raw.numpy())


def _blocks(model: nn.Module, layers: str | Iterable[int] | None) -> Iterator[_Block]:
    """Blocks with experts and a router of these layers."""
    blocks = []
    for path, module in model.named_modules():
        children = dict(module.named_children())
        name = next((n for n in _NAMES if n in children), None)
        numbers = [int(part) for part in path.split(".") if part.isdecimal()]
        if "experts" in children and name is not None and numbers:
            blocks.append(_Block(numbers[-1], path, module, name))
    with_router = sorted({block.layer for block in blocks})
    requested = parse_layers(layers) if isinstance(layers, str) else layers
    selection = with_router if requested is None else sorted(set(requested))
    absent = [layer for layer in selection if layer not in with_router]
    if absent or not selection:
        raise UsageError(
            f"replace_router: {type(model).__name__} has no module with experts and a router "
            f"('{_NAMES[0]}' or '{_NAMES[1]}') in "
            f"{f'layer {absent[0]}' if absent else 'any layer'}.",
            f"Layers that have one: {', '.join(map(str, with_router))}." if with_router else "",
        )
    return (block for block in blocks if block.layer in selection)


def _weight(router: nn.Module, where: str) -> nn.Parameter:
    weight = getattr(router, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        raise UsageError(
            f"replace_router: {where} ({type(router).__name__}) has no matrix 'weight' of rows.",
            "Pass a module instead of rows.",
        )
    return weight


def _rows(block: _Block) -> torch.Tensor | None:
    """A copy of the old rows, to put them back."""
    weight = getattr(block.router, "weight", None)
    return weight.detach().clone() if isinstance(weight, nn.Parameter) else None


def _write(router: nn.Module, rows: torch.Tensor | None) -> None:
    if rows is not None:
        with torch.no_grad():
            _weight(router, "the router").copy_(rows)


def _exchange(block: _Block, new: Replacement | Callable[[int, nn.Module], Replacement]) -> None:
    where, router = f"{block.path}.{block.name}", block.router
    if isinstance(new, nn.Module):
        new = copy.deepcopy(new)
    elif not isinstance(new, torch.Tensor | np.ndarray):
        new = new(block.layer, router)
    if isinstance(new, nn.Module):
        _take_over(new, router)
        _refuse_other(new, router, where)
        setattr(block.module, block.name, new)
        return
    rows, weight = torch.as_tensor(new), _weight(router, where)
    if rows.shape != weight.shape or not torch.isfinite(rows).all():
        raise UsageError(
            f"replace_router: rows for {where} have shape {tuple(rows.shape)}; expected "
            f"{tuple(weight.shape)}, all finite."
        )
    _write(router, rows)


def _take_over(new: nn.Module, old: nn.Module) -> None:
    """Dtype, device, mode, hooks and load of the old router."""
    sample = next(itertools.chain(old.parameters(), old.buffers()), None)
    if sample is not None:
        new.to(sample.device, sample.dtype if sample.is_floating_point() else None)
    new.train(old.training)
    buffers = dict(old.named_buffers())
    for name, buffer in new.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape and new is not old:
            with torch.no_grad():
                buffer.copy_(buffers[name])
    for name in _HOOKS:
        # the very mapping, so that handles of old hooks still take them off
        hooks = getattr(old, name)
        if new is not old:
            hooks.update(getattr(new, name))
            setattr(new, name, hooks)


def _refuse_other(new: nn.Module, old: nn.Module, where: str) -> None:
    """Raises UsageError where the new router does not give what the old one gives."""
    tokens = _tokens(old, where)
    expected, actual = _given(old, tokens), _given(new, tokens)
    is_same = len(expected) == len(actual) and all(
        a.is_floating_point() == b.is_floating_point() and a.shape[:-1] == b.shape[:-1]
        for a, b in zip(expected, actual, strict=False)
    )
    if not is_same:
        raise UsageError(
            f"replace_router: {type(new).__name__} gives {_told(actual)} for {where}, where "
            f"{type(old).__name__} gave {_told(expected)}.",
            "The block around a router reads what it gives: wrap the new one.",
        )


def _tokens(old: nn.Module, where: str) -> torch.Tensor:
    """Two tokens of zeros, as wide as the first matrix of a router reads."""
    matrix = next((value for value in old.parameters() if value.ndim == 2), None)
    if matrix is None:
        raise UsageError(f"replace_router: {where} ({type(old).__name__}) has no matrix of rows.")
    return matrix.new_zeros(2, matrix.shape[1])


def _given(router: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Outputs of the router for these tokens; its buffers are restored afterwards."""
    state = {name: value.clone() for name, value in router.named_buffers()}
    with torch.no_grad():
        result = router.forward(tokens)
        for name, value in router.named_buffers():
            value.copy_(state[name])
    return [one for one in _flat(result) if isinstance(one, torch.Tensor)]


def _flat(result: Any) -> Iterator[Any]:
    if isinstance(result, tuple | list):
        for one in result:
            yield from _flat(one)
    else:
        yield result


def _told(tensors: list[torch.Tensor]) -> str:
    return ", ".join(f"{one.dtype} {tuple(one.shape)}" for one in tensors) or "no tensor"


def _refuse_changed(block: _Block, before: dict[str, str]) -> None:
    after = expert_hashes(block.module, block.name)
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    if changed:
        raise RouterError(
            f"{block.path}: tensor '{changed[0]}' of the experts changed while the router was "
            f"exchanged ({len(changed)} in all); expected all of them as they were.",
            "The old routers are back; load the experts again.",
        )
