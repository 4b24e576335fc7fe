"""One expert, merged of all, for comparison: at the cost of merging."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float
from moegeom.trainable.router import at_least_float32, product


class SMEAR(nn.Module):
    r"""An expert whose parameters are :math:`\sum_e \bar p_e \theta_e`, experts being alike.

    :math:`\bar p` is the mean over the sequence of the softmax of ``W y``, which later tokens
    enter; with ``causal`` the mean over the tokens up to each one, whose expert is merged for it
    alone, so that E |theta| numbers are added up per token. Experts must not have buffers.
    Probabilities are float32 at least, parameters are merged in their own dtype.
    Source: Muqeeth et al. 2023, arXiv 2306.03745. Oracle in tests: the definition by loops.
    """

    def __init__(self, experts: Iterable[nn.Module], hidden: int, *, causal: bool = False) -> None:
        super().__init__()
        self.experts: nn.ModuleList = nn.ModuleList(experts)
        shapes = [
            [(name, value.shape) for name, value in expert.named_parameters()]
            for expert in self.experts
        ]
        if not shapes or any(shape != shapes[0] for shape in shapes):
            raise UsageError(
                "SMEAR: experts have different parameters, expected one expert or more of one kind."
            )
        if any(True for _ in self.experts.buffers()):
            raise UsageError("SMEAR: experts have buffers, which cannot be averaged.")
        self.causal = causal
        self.weight: nn.Parameter = nn.Parameter(
            torch.randn(len(self.experts), hidden) * hidden**-0.5
        )

    def macs(self, length: int) -> int:
        """MACs of one sequence without running the expert: logits, merging once or per token."""
        parameters = sum(parameter.numel() for parameter in self.experts.parameters())
        return length * self.weight.numel() + parameters * (length if self.causal else 1)

    def probability(
        self, inputs: Float[Tensor, "*batch length hidden"]
    ) -> Float[Tensor, "*batch places experts"]:
        """The share of every expert: for each prefix with ``causal``, else one for the sequence."""
        with torch.autocast(inputs.device.type, enabled=False):
            single = product(inputs.to(at_least_float32(inputs)), self.weight).softmax(dim=-1)
            if not self.causal:
                return single.mean(dim=-2, keepdim=True)
            counts = torch.arange(1, single.shape[-2] + 1, device=single.device)
            return single.cumsum(dim=-2) / counts[:, None]

    def forward(
        self, inputs: Float[Tensor, "*batch length hidden"]
    ) -> Float[Tensor, "*batch length output"]:
        """Outputs of the merged experts."""
        share = self.probability(inputs)
        # With causal every token is a sequence of its own, with its own expert.
        pieces = inputs.unsqueeze(-2) if self.causal else inputs
        batch, piece = pieces.shape[:-2], pieces.shape[-2:]
        share = share.reshape(-1, len(self.experts))
        owned = [dict(expert.named_parameters()) for expert in self.experts]
        stacked = {name: torch.stack([own[name] for own in owned]) for name in owned[0]}
        merged = {
            name: torch.tensordot(share.to(value.dtype), value, dims=1)
            for name, value in stacked.items()
        }
        like = self.experts[0]

        def run(parameters: dict[str, Tensor], piece: Tensor) -> Tensor:
            return torch.func.functional_call(like, parameters, piece)

        out = torch.vmap(run)(merged, pieces.reshape(-1, *piece))
        out = out.reshape(*batch, *out.shape[1:])
        return out.squeeze(-2) if self.causal else out
