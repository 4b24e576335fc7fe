"""From what a router's module was given to what is kept of it, on the device where it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from moegeom.core.errors import RecordingError
from moegeom.core.router import Router
from moegeom.core.tokens import expert_bytes
from moegeom.recorder.keep import Keep
from moegeom.recorder.taps import Place

#: Integers by their size in bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, eq=False)
class Kept:
    """Rows of one router: ``values`` (None for ids), ``expert`` beside the largest logits.

    ``outputs`` of experts by their kind.
    """

    values: torch.Tensor | None
    expert: torch.Tensor | None
    chosen: torch.Tensor | None
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class KeptParts:
    """One router's way from inputs to what is kept; its weight is moved to a device once."""

    place: Place
    keep: Keep
    _on_device: dict[torch.device, _Held] = field(default_factory=dict)

    def of(self, inputs: torch.Tensor, chosen: torch.Tensor | None) -> Kept:
        """What is kept of these tokens; nothing is waited for."""
        router = self.place.router
        experts = None if chosen is None else _numbers(chosen, router)
        if self.keep.stage == "ids":
            if experts is None:
                raise RecordingError(
                    f"router {router.name}: its module ({self.place.paths[0]}) does not give its "
                    "choice back, and ids are all that is to be kept.",
                    "Keep logits or hidden.",
                )
            return Kept(None, None, experts)
        if self.keep.stage == "router_input":
            return Kept(inputs, None, experts)
        logits = self._logits(inputs)
        if self.keep.stage == "logits":
            return Kept(logits, None, experts)
        largest = logits.topk(self.keep.num_logits, dim=-1)
        return Kept(largest.values, _numbers(largest.indices, router), experts)

    def _logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """W y + b in float32, whatever precision the model runs in."""
        held = self._held_on(inputs.device)
        # autocast would take the product back to 16 bits
        with torch.no_grad(), torch.autocast(inputs.device.type, enabled=False):
            y = inputs.to(held.rows.dtype)
            return (held.logits(y) * held.cosine_scale(y)).float()

    def _held_on(self, device: torch.device) -> _Held:
        if device not in self._on_device:
            self._on_device[device] = _Held.on(device, self.place.router)
        return self._on_device[device]


@dataclass(frozen=True, eq=False)
class _Held:
    """A router's arrays on one device, in the dtype of its rows."""

    rows: torch.Tensor
    bias: torch.Tensor | None
    projection: torch.Tensor | None
    projection_bias: torch.Tensor | None
    scale: float | None

    @classmethod
    def on(cls, device: torch.device, router: Router) -> _Held:
        def moved(array: np.ndarray | None) -> torch.Tensor | None:
            if array is None:
                return None
            # arrays of a mapped checkpoint cannot be written to, which torch warns of
            return torch.tensor(array.astype(router.weight.dtype, copy=False), device=device)

        rows = torch.tensor(router.weight, device=device)
        bias, projection = moved(router.logit_bias), router.projection
        if projection is None or projection.scale is None:
            return cls(rows, bias, None, None, None)
        return cls(rows, bias, moved(projection.weight), moved(projection.bias), projection.scale)

    def logits(self, y: torch.Tensor) -> torch.Tensor:
        logits = y @ self.rows.T
        return logits if self.bias is None else logits + self.bias

    def cosine_scale(self, y: torch.Tensor) -> torch.Tensor | float:
        """What turns ``W y + b`` into scaled cosines: 1 for routers that compare no directions."""
        if self.projection is None or self.scale is None:
            return 1.0
        projected = y @ self.projection.T
        if self.projection_bias is not None:
            projected = projected + self.projection_bias
        # a zero vector has no direction: every cosine is 0, as where it is divided by 1e-12
        return self.scale / projected.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def _numbers(experts: torch.Tensor, router: Router) -> torch.Tensor:
    return experts.to(_INTEGERS[expert_bytes(router.num_experts)])
