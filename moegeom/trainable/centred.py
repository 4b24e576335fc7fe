"""A router whose mean logits are taken away, so that the mean input chooses no expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float
from moegeom.trainable.router import Routed, RouterModule


class CentredRouter(RouterModule):
    r"""``router`` with a ``logit_bias`` of minus the running mean of its logits.

    In training the mean of every batch enters with 1 - ``decay``, the first ones alike, after the
    batch was routed and without gradient, so that no token sees a later one. What all experts have
    in common stays: the bias adds up to 0. Losses are those of the router on the centred logits.
    Oracle in tests: the mean by loops.
    """

    logit_bias: Tensor
    num_seen: Tensor

    def __init__(self, router: RouterModule, *, decay: float = 0.99) -> None:
        super().__init__(router.num_experts, router.top_k, router.hidden)
        if not 0.0 <= decay < 1.0:
            raise UsageError(f"CentredRouter: decay is {decay:g}, expected 0 to below 1.")
        self.router, self.decay = router, decay
        self.register_buffer("logit_bias", torch.zeros(router.num_experts))
        self.register_buffer("num_seen", torch.tensor(0))

    @property
    def token_local(self) -> bool:
        """As the router inside."""
        return self.router.token_local

    @property
    def macs_per_token(self) -> int:
        """As the router inside."""
        return self.router.macs_per_token

    def scored(self, inputs: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "tokens experts"]:
        """Centred logits."""
        logits = self.router.scored(inputs)
        centred = logits + self.logit_bias.to(logits.dtype)
        if self.training and len(logits):
            self._follow(logits.detach())
        return centred

    def choose(self, logits: Float[Tensor, "tokens experts"]) -> Routed:
        """What the router chooses of centred logits."""
        return self.router.choose(logits)

    @torch.no_grad()
    def _follow(self, logits: Tensor) -> None:
        self.num_seen += 1
        share = max(1.0 - self.decay, 1.0 / int(self.num_seen))
        mean = logits.mean(dim=0)
        self.logit_bias.lerp_((mean.mean() - mean).to(self.logit_bias.dtype), share)
