"""Hooks at the block of a router and at its shared experts: what they give."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from moegeom.core.errors import RecordingError
from moegeom.core.router import Router
from moegeom.core.text import number_of
from moegeom.recorder.taps import Place
from moegeom.router.expert_tensors import experts_spec

#: The last part of the path of a module with shared experts; it holds no other such module.
_SHARED = re.compile(r"(?:.*\.)?shared?_(?:experts?|mlp)")

_LAYER = re.compile(r".*?(?:layers|layer|blk|blocks|block|h)\.[0-9]+\.")

_ELSEWHERE = "moegeom outputs computes them from the checkpoint, on recorded router inputs."


class OutputTap:
    """Keeps what the block and the shared experts of one router gave, until it is taken.

    What the routed experts gave is the difference where shared experts run inside the block. Each
    expert on every token is asked of the module that holds the experts.

    Raises
    ------
    RecordingError
        When the block gives something else than the sum of its experts, or, for every expert, they
        cannot be asked one by one.
    """

    def __init__(self, place: Place, model: torch.nn.Module, kinds: Sequence[str]) -> None:
        self._router, self._kinds = place.router, kinds
        path = place.paths[-1]
        self._path, self._block = path, model.get_submodule(path)
        shared = _shared_path(model, path)
        _refuse_other_sums(place.router, path, bool(shared))
        self._is_inside = shared.startswith(f"{path}.")
        self._shared = model.get_submodule(shared) if shared else None
        self._gate = _child(model, f"{shared}_gate") if shared else None
        self._every = _every(place.router, self._block, path) if "expert_output" in kinds else None
        self._seen: dict[str, torch.Tensor] = {}

    def hooks(self) -> Iterator[Any]:
        """Puts the hooks on; each handle takes one off."""
        modules = {"block": self._block, "shared": self._shared, "gate": self._gate}
        for part, module in modules.items():
            if module is not None:
                yield module.register_forward_hook(self._after(part))

    def _after(self, part: str) -> Callable[..., None]:
        def after(module: Any, arguments: tuple[Any, ...], result: Any) -> None:
            if part not in self._seen:
                found = result[0] if isinstance(result, (tuple, list)) else result
                # blocks may add to what their shared experts gave, in place
                self._seen[part] = found.detach().clone()

        return after

    def every(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """What each expert gives on each token, (tokens, experts, hidden); None unless asked."""
        return None if self._every is None else self._every(inputs)

    @torch.no_grad()
    def take(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Shared and routed output of the pass, one row for each token; forgets it."""
        seen, self._seen = self._seen, {}
        if "block" not in seen:
            raise RecordingError(
                f"router {self._router.name}: its block ('{self._path}') was not called as a "
                "module, so that there is nothing to listen to.",
                _ELSEWHERE,
            )
        total = self._rows(seen["block"], num_rows)
        shared = torch.zeros_like(total)
        if "shared" in seen:
            shared = self._rows(seen["shared"], num_rows)
            if "gate" in seen:
                shared = torch.sigmoid(seen["gate"].reshape(num_rows, -1)) * shared
        routed = total
        if self._is_inside and "shared" in seen:
            routed = (total.float() - shared.float()).to(total.dtype)
        return {"shared_output": shared.to(total.dtype), "routed_output": routed}

    def forget(self) -> None:
        """Of a pass that is not recorded."""
        self._seen = {}

    def _rows(self, values: torch.Tensor, num_rows: int) -> torch.Tensor:
        hidden = self._router.hidden_size
        if values.shape[-1:] != (hidden,) or values.numel() != num_rows * hidden:
            raise RecordingError(
                f"router {self._router.name}: its block gives {list(values.shape)}; expected "
                f"{number_of(num_rows, 'token')} of {hidden}.",
                _ELSEWHERE,
            )
        return values.reshape(num_rows, hidden)


def _refuse_other_sums(router: Router, path: str, has_shared: bool) -> None:
    spec = experts_spec(router)
    why = spec.not_a_function or spec.behind
    if has_shared and spec.factor_beside_shared.value != 1.0:
        why = "it may be the mean of shared and routed experts"
    if why:
        raise RecordingError(
            f"router {router.name}: its block ('{path}') does not give the sum of its experts: "
            f"{why}.",
            _ELSEWHERE,
        )


def _shared_path(model: torch.nn.Module, block: str) -> str:
    """The module with the shared experts of the layer; empty where there is none."""
    layer = _LAYER.match(f"{block}.")
    start = layer[0] if layer else f"{block}."
    found = [
        path
        for path, _ in model.named_modules()
        if path.startswith(start) and _SHARED.fullmatch(path)
    ]
    return min(found, key=len, default="")


def _child(model: torch.nn.Module, path: str) -> torch.nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _every(
    router: Router, block: torch.nn.Module, path: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Asks the module with the experts: tokens, an expert for each, weights of 1."""
    experts = _child(block, "experts")
    names = [] if experts is None else [*inspect.signature(experts.forward).parameters]
    spec = experts_spec(router)
    if (
        experts is None
        or len(names) != 3
        or spec.latent
        or isinstance(experts, torch.nn.ModuleDict)
    ):
        raise RecordingError(
            f"router {router.name}: experts of its block ('{path}') cannot be asked one by one.",
            _ELSEWHERE,
        )

    @torch.no_grad()
    def every(inputs: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(len(inputs), 1, dtype=inputs.dtype, device=inputs.device)
        found = [
            experts(inputs, torch.full_like(ones, expert, dtype=torch.int64), ones)
            for expert in range(router.num_experts)
        ]
        return torch.stack([one.reshape(inputs.shape) for one in found], dim=1)

    return every
