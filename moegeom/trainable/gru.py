"""Routing by a recurrent state: the choice of a token depends on the tokens before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moegeom.core.shapes import Float
from moegeom.geometry.capacity import router_macs
from moegeom.trainable.router import Routed, at_least_float32
from moegeom.trainable.top_k import TopKRouter


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
        self.router_dim, self.temperature = router_dim, temperature
        self.gru = nn.GRU(hidden, num_experts * router_dim, bias=False, batch_first=True)
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


def cosine(
    first: Float[Tensor, "tokens experts size"], second: Float[Tensor, "*tokens experts size"]
) -> Float[Tensor, "tokens experts"]:
    """Cosines of vectors, token by token and expert by expert; lengths count as 1e-12 at least."""
    unit = nn.functional.normalize(first, dim=-1, eps=1e-12)
    return (unit * nn.functional.normalize(second, dim=-1, eps=1e-12)).sum(dim=-1)
