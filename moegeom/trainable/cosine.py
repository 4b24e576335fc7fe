"""Top-k routing by cosines in a projection of the input (GMoE)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from moegeom.core.shapes import Float
from moegeom.geometry.capacity import router_macs
from moegeom.trainable.router import product
from moegeom.trainable.top_k import TopKRouter

#: The learned scale of the cosines is cut off here, as in the gate of tutel.
LARGEST_SCALE = 100.0


class CosineRouter(TopKRouter):
    r"""Logits :math:`s \cos(P y, u_e)` with a learned scale s up to 100.

    P is (``projected``, hidden), u_e the rows of ``weight``. Lengths below 1e-12 count as 1e-12.
    Neither the length of a row nor that of an input favours an expert. Everything else is as in
    :class:`TopKRouter`.
    Source: Li et al. 2022, arXiv 2206.04046. Oracle in tests: torch's cosine_similarity.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden: int,
        *,
        projected: int = 256,
        scale_of_cosines: float = 10.0,
        **of_top_k: Any,
    ) -> None:
        super().__init__(num_experts, top_k, hidden, row_size=projected, **of_top_k)
        self.projection = nn.Parameter(torch.randn(projected, hidden) * hidden**-0.5)
        self.log_scale = nn.Parameter(torch.tensor([math.log(scale_of_cosines)]))

    @property
    def macs_per_token(self) -> int:
        """The projection, and a row of it for every expert."""
        return router_macs(self.num_experts, self.hidden, len(self.projection)).cosine

    def scored(self, inputs: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "tokens experts"]:
        """Cosines times the scale, plus the bias where there is one."""
        projected = product(self.jittered(inputs).reshape(-1, self.hidden), self.projection)
        unit = nn.functional.normalize(projected, dim=1, eps=1e-12)
        rows = nn.functional.normalize(self.weight.to(unit.dtype), dim=1, eps=1e-12)
        scale = self.log_scale.to(unit.dtype).clamp(max=math.log(LARGEST_SCALE)).exp()
        logits = product(unit, rows) * scale
        return logits if self.bias is None else logits + self.bias.to(logits.dtype)
