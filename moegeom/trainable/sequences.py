"""Routing of sequences: by a recurrent state, by one merged expert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float
from moegeom.geometry.capacity import router_macs
from moegeom.trainable.router import Routed, at_least_float32, cosine, product
from moegeom.trainable.top_k import TopKRouter


# -------------------------------------------------------------------------------- a recurrent state
class GRURouter(TopKRouter):
    r"""Cosines of a routing vector with the rows of ``weight``, over ``temperature``.

    One step of a gated recurrent unit for each token makes E R numbers, R = ``router_dim``, from
    its input y and the state h of the token before:

    .. math::
        r, u = \sigma(W_i y + W_h h), \quad n = \tanh(W_n y + r \odot V_n h), \quad
        h' = (1 - u) \odot n + u \odot h,

    E routing vectors of R numbers. Inputs are (..., length, hidden), each sequence beginning with a
    state of zeros. Causal, but no function of the token. Everything else as in
    :class:`TopKRouter`. Source: S3 A.3.6, D.3. Oracle in tests: torch.nn.GRUCell.
    """

    token_local = False

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden: int,
        *,
        router_dim: int = 128,
        temperature: float = 0.1,
        **of_top_k: Any,
    ) -> None:
        super().__init__(num_experts, top_k, hidden, row_size=router_dim, **of_top_k)
        self.router_dim = router_dim
        self.temperature = temperature
        self.gru: nn.GRU = nn.GRU(hidden, num_experts * router_dim, bias=False, batch_first=True)
        # Gate by gate: the three together would be neither orthogonal nor of Xavier's width.
        of_gru = dict(self.gru.named_parameters())
        for part in of_gru["weight_ih_l0"].data.chunk(3):
            nn.init.xavier_uniform_(part)
        for part in of_gru["weight_hh_l0"].data.chunk(3):
            nn.init.orthogonal_(part)

    @property
    def macs_per_token(self) -> int:
        """Three gates that read input and state."""
        return router_macs(self.num_experts, self.hidden, self.router_dim).gru

    def scored(self, inputs: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "tokens experts"]:
        """Logits of every token of sequences that begin here."""
        return self._read(inputs, None)[0]

    def continued(
        self,
        inputs: Float[Tensor, "*batch length hidden"],
        state: Float[Tensor, "*batch size"] | None,
    ) -> tuple[Routed, Float[Tensor, "*batch size"]]:
        """The same behind a state, and the state after the last token: for decoding.

        None begins a sequence.
        """
        with torch.autocast(inputs.device.type, enabled=False):
            logits, after = self._read(inputs.to(at_least_float32(inputs)), state)
            return self.choose(logits), after

    def _read(self, inputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        batch, size = inputs.shape[:-2], self.num_experts * self.router_dim
        dtype = torch.promote_types(inputs.dtype, self.weight.dtype)
        sequences = self.jittered(inputs).reshape(-1, *inputs.shape[-2:]).to(dtype)
        start = None if state is None else state.reshape(1, -1, size).to(dtype)
        if self.weight.dtype == dtype:
            vectors, last = self.gru(sequences, start)
        else:
            wide = {name: value.to(dtype) for name, value in self.gru.named_parameters()}
            vectors, last = torch.func.functional_call(self.gru, wide, (sequences, start))
        logits = cosine(
            vectors.reshape(-1, self.num_experts, self.router_dim), self.weight.to(dtype)
        )
        logits = logits / self.temperature
        logits = logits if self.bias is None else logits + self.bias.to(dtype)
        return logits, last.reshape(*batch, size)


# ---------------------------------------- one merged expert: for comparison, at the cost of merging
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
