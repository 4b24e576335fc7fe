"""From what a router's module was given to what is kept of it, on the device where it is."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moegeom.capture.keep import Keep
from moegeom.capture.taps import Place
from moegeom.core.errors import RecordingError
from moegeom.core.footprint import expert_bytes
from moegeom.core.router import Router

#: Integers by their size in bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, eq=False)
class Kept:
    """Rows of one router: ``values`` (None for ids), ``expert`` beside the largest logits."""

    values: torch.Tensor | None
    expert: torch.Tensor | None
    chosen: torch.Tensor | None


@dataclass(eq=False)
class KeptParts:
    """One router's way from inputs to what is kept; its weight is moved to a device once."""

    place: Place
    keep: Keep
    _on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor | None]] = field(
        default_factory=dict
    )

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
        rows, bias = self._arrays(inputs.device)
        # autocast would take the product back to 16 bits
        with torch.no_grad(), torch.autocast(inputs.device.type, enabled=False):
            y = inputs.to(rows.dtype)
            logits = y @ rows.T
            if bias is not None:
                logits = logits + bias
            return (logits * self._cosine_scale(y)).float()

    def _cosine_scale(self, y: torch.Tensor) -> torch.Tensor | float:
        """What turns ``W y + b`` into scaled cosines: 1 for routers that compare no directions."""
        projection = self.place.router.projection
        if projection is None or projection.scale is None:
            return 1.0
        projected = y @ torch.from_numpy(projection.weight).to(y).T
        if projection.bias is not None:
            projected = projected + torch.from_numpy(projection.bias).to(y)
        # a zero vector has no direction: every cosine is 0, as where it is divided by 1e-12
        length = projected.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        return projection.scale / length

    def _arrays(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        if device not in self._on_device:
            router = self.place.router
            bias = router.logit_bias
            self._on_device[device] = (
                torch.from_numpy(router.weight).to(device),
                None
                if bias is None
                else torch.from_numpy(bias.astype(router.weight.dtype)).to(device),
            )
        return self._on_device[device]


def _numbers(experts: torch.Tensor, router: Router) -> torch.Tensor:
    return experts.to(_INTEGERS[expert_bytes(router.num_experts)])
