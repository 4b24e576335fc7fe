"""ReLU routing (ReMoE): every expert with a positive logit, held to k on average by a loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float
from moegeom.geometry.capacity import router_macs
from moegeom.trainable.router import Routed, RouterModule, descending, product

#: From 0 a strength would never grow again, and a few hundred sparse steps lead there.
_LEAST = 1e-30


class ReLURouter(RouterModule):
    r"""Weights :math:`\max(W y + b, 0)`; experts with weight 0 do not run.

    They are continuous, and a token may have no expert or all of them. The loss ``sparsity`` is

    .. math::
        \frac{\lambda}{L T} \sum_{t,e} f_e\, g_{te}, \quad f_e = \frac{E}{k T} \#\{t: g_{te} > 0\},

    f without gradient, L = ``num_layers`` routers that share :math:`\lambda`, the buffer
    ``strength``, which :func:`update_strength` moves until k experts run on average.
    Source: Wang et al. 2025, arXiv 2412.14711. Oracle in tests: the loss by loops.
    """

    strength: Tensor
    sparsity: Tensor

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden: int,
        *,
        has_bias: bool = False,
        num_layers: int = 1,
        strength: float = 1e-8,
        factor: float = 1.2,
    ) -> None:
        super().__init__(num_experts, top_k, hidden)
        if num_layers < 1 or strength <= 0.0 or factor <= 1.0:
            raise UsageError(
                f"ReLURouter: num_layers {num_layers}, strength {strength:g}, factor {factor:g}; "
                "expected a layer, a positive strength and a factor above 1."
            )
        self.num_layers, self.factor = num_layers, factor
        self.weight = nn.Parameter(torch.randn(num_experts, hidden) * hidden**-0.5)
        self.bias = nn.Parameter(torch.zeros(num_experts)) if has_bias else None
        self.register_buffer("strength", torch.tensor(strength))
        self.register_buffer("sparsity", torch.tensor(torch.nan), persistent=False)

    @property
    def macs_per_token(self) -> int:
        """A row for every expert."""
        return router_macs(self.num_experts, self.hidden).linear

    def scored(self, inputs: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "tokens experts"]:
        """Logits ``W y + b``."""
        return product(inputs.reshape(-1, self.hidden), self.weight, self.bias)

    def choose(self, logits: Float[Tensor, "tokens experts"]) -> Routed:
        """Every expert with a positive logit, the largest first."""
        values, order = descending(logits)
        is_chosen = values > 0.0
        slots = int(is_chosen.sum(dim=1).max()) if len(logits) else 0
        weights = torch.relu(values[:, :slots])
        chosen = order[:, :slots].masked_fill(~is_chosen[:, :slots], -1)
        gates = torch.relu(logits)
        is_on = (gates > 0.0).to(gates.dtype)
        if self.training:
            self.sparsity = 1.0 - is_on.mean()
        over_fair = self.num_experts / self.top_k * is_on.mean(dim=0)
        per_token = (over_fair * gates.mean(dim=0)).sum() / self.num_layers
        loss = self.strength.to(gates.dtype) * per_token
        return Routed(chosen, weights, logits, {"sparsity": loss})


@torch.no_grad()
def update_strength(routers: Sequence[ReLURouter]) -> float:
    r"""After a step: :math:`\lambda \leftarrow \lambda\, f^{\mathrm{sign}(1 - k/E - \bar S)}`.

    :math:`\bar S` is the mean share of weights that were 0 in the last batch of each router; it is
    returned. Fewer zeros than asked for make :math:`\lambda` grow; it stays above 1e-30.

    Raises
    ------
    UsageError
        Where no batch was routed in training, or a strength was cast to 0.
    Source: Wang et al. 2025, arXiv 2412.14711. Oracle in tests: the formula, step by step.
    """
    if not routers or any(bool(router.sparsity.isnan()) for router in routers):
        raise UsageError("update_strength: no batch was routed in training yet.")
    if any(float(router.strength) == 0.0 for router in routers):
        raise UsageError(
            f"update_strength: a strength is 0 in {routers[0].strength.dtype}, and stays so.",
            "Keep it in float32: router.strength = torch.tensor(1e-8).",
        )
    zeros = sum(float(router.sparsity) for router in routers) / len(routers)
    for router in routers:
        missing = 1.0 - router.top_k / router.num_experts - zeros
        sign = (missing > 0.0) - (missing < 0.0)
        router.strength.mul_(router.factor**sign).clamp_(min=_LEAST)
    return zeros
