"""Soft mixtures, where every token enters every slot: for comparison, not causal."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float
from moegeom.core.text import number_of
from moegeom.trainable.router import at_least_float32, product


class SoftMoE(nn.Module):
    r"""A layer of experts that see mixtures of the tokens of a sequence.

    With logits :math:`z_{ts} = y_t \cdot \phi_s`, ``slots`` of them for each expert, slot s sees
    :math:`\sum_t D_{ts} y_t`, D the softmax over tokens, and a token gets :math:`\sum_s C_{ts} o_s`
    of the outputs, C the softmax over all slots. Nothing is chosen and nothing is dropped; what a
    token gets depends on later ones. D and C are made in float32 at least; the result has the dtype
    of the experts' outputs.
    Source: Puigcerver et al. 2023, arXiv 2308.00951. Oracle in tests: the definition by loops.
    """

    def __init__(self, experts: Iterable[nn.Module], hidden: int, *, slots: int = 1) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        if not len(self.experts) or slots < 1:
            raise UsageError(
                f"SoftMoE: {number_of(len(self.experts), 'expert')} of {number_of(slots, 'slot')}, "
                "expected one at least."
            )
        self.slots = slots
        self.phi = nn.Parameter(torch.randn(len(self.experts) * slots, hidden) * hidden**-0.5)

    @property
    def macs_per_token(self) -> int:
        """Logits, mixing and combining; experts run on their slots on top of that."""
        return 3 * self.phi.numel()

    def forward(
        self, inputs: Float[Tensor, "*batch length hidden"]
    ) -> Float[Tensor, "*batch length output"]:
        """Outputs for every token of each sequence."""
        with torch.autocast(inputs.device.type, enabled=False):
            wide = inputs.to(at_least_float32(inputs))
            logits = product(wide, self.phi)
            dispatch, combine = logits.softmax(dim=-2), logits.softmax(dim=-1)
            mixed = torch.einsum("...ls,...lh->...sh", dispatch, wide.to(dispatch.dtype))
        parts = mixed.to(inputs.dtype).split(self.slots, dim=-2)
        outputs = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        output = torch.cat(outputs, dim=-2)
        with torch.autocast(inputs.device.type, enabled=False):
            return (combine @ output.to(combine.dtype)).to(output.dtype)
