"""Routing whose weights are continuous: experts below the k-th fade, or a positive logit runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float
from moegeom.trainable.router import Routed, RouterModule, descending, product
from moegeom.trainable.top_k import CosineRouter, TopKRouter

# ----------------------------------------------------------------------------------- smoothed top-k
#: What moves eps: the gradient of the boundary loss, or the gaps of the last batches.
Controller = Literal["loss", "exact"]


class SmoothTopKRouter(TopKRouter):
    r"""Top-k routing whose weights are continuous in the router input (SmoothSMoE).

    Every expert with a selection score within ``eps`` of the k-th largest, q_[k], is chosen. Scores
    are multiplied by s(u), u = (q - q_[k] + eps) / eps,

    .. math:: s(u) = \frac{u^a}{u^a + (1 - u)^b},

    which is 1 from the k-th on and falls to 0 at the end of the strip; with a = 1, b = 50 its whole
    fall is in the last tenth, with slopes up to 17.8 / eps. As many slots are returned as the token
    with most experts needs. With eps = 0 the choice is top-k.

    ``budget`` is the mean number of experts to have, ``top_k`` + 1/2 unless it is said. With
    ``controller="loss"`` eps = softplus(theta), and the loss ``boundary`` is ``boundary_coef`` eps
    (K - budget), where K, the mean number of this batch, has no gradient: a root finder for K =
    budget, whose minimum means nothing. theta needs a parameter group of its own
    (:func:`parameter_groups`). With ``controller="exact"`` eps follows the gaps of the batches seen
    in training, by a running mean with ``decay``, taken over every ``every`` batches.

    With ``detach_gate`` no gradient flows through s. ``hard_at_inference`` chooses exactly
    ``top_k`` in evaluation. Source: S0 section 6 and B.5; docs/theory.md A11, A12.
    Oracle in tests: smoothing in NumPy, finite differences.
    """

    theta: nn.Parameter | None
    held_eps: Tensor | None
    mean_eps: Tensor | None
    num_seen: Tensor | None

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden: int,
        *,
        eps: float = 0.1,
        budget: float | None = None,
        a: float = 1.0,
        b: float = 50.0,
        boundary_coef: float = 0.01,
        controller: Controller = "loss",
        decay: float = 0.99,
        every: int = 1,
        detach_gate: bool = False,
        hard_at_inference: bool = False,
        **of_top_k: Any,
    ) -> None:
        super().__init__(num_experts, top_k, hidden, **of_top_k)
        self.budget: float = top_k + 0.5 if budget is None else budget
        if not top_k <= self.budget <= num_experts:
            raise UsageError(
                f"SmoothTopKRouter: budget is {self.budget:g}, expected {top_k} to {num_experts}."
            )
        if controller not in ("loss", "exact"):
            raise UsageError(
                f"SmoothTopKRouter: controller is {controller!r}, expected loss or exact."
            )
        if not (eps > 0.0 and a > 0.0 and b > 0.0 and every >= 1 and 0.0 <= decay < 1.0):
            raise UsageError(
                f"SmoothTopKRouter: eps {eps:g}, a {a:g}, b {b:g}, every {every}, decay "
                f"{decay:g}; expected positive numbers and a decay below 1."
            )
        self.a = a
        self.b = b
        self.boundary_coef = boundary_coef
        self.controller = controller
        self.decay = decay
        self.every = every
        self.detach_gate = detach_gate
        self.hard_at_inference = hard_at_inference
        is_learned = controller == "loss"
        raw = eps + math.log(-math.expm1(-eps))  # softplus of it is eps
        self.theta = nn.Parameter(torch.tensor(raw)) if is_learned else None
        self.register_buffer("held_eps", None if is_learned else torch.tensor(eps))
        self.register_buffer("mean_eps", None if is_learned else torch.tensor(0.0))
        self.register_buffer("num_seen", None if is_learned else torch.tensor(0))

    @property
    def eps(self) -> Float[Tensor, ""]:
        """The width of the strip, in units of the selection score."""
        if self.theta is not None:
            return nn.functional.softplus(self.theta)
        assert self.held_eps is not None
        return self.held_eps

    def anneal(self, epoch: float, first: float = 40.0, last: float = 60.0) -> None:
        """Budget of an epoch: top_k + 1/2 until ``first``, then falling to top_k at ``last``.

        Source: S0 B.5 (of 80 epochs).
        """
        left = min(max((last - epoch) / (last - first), 0.0), 1.0)
        self.budget = self.top_k + 0.5 * left

    def choose(self, logits: Float[Tensor, "tokens experts"]) -> Routed:
        """Every expert within eps of the k-th, the nearest first."""
        if self.hard_at_inference and not self.training:
            return super().choose(logits)
        values, order = descending(self.selection(logits))
        gap = values[:, [self.top_k - 1]] - values
        if self.training and self.controller == "exact":
            self._follow(gap.detach())
        eps = self.eps.to(logits.dtype)
        is_chosen = gap < eps
        is_chosen[:, : self.top_k] = True
        num_chosen = is_chosen.sum(dim=1)
        slots = int(num_chosen.max()) if len(logits) else self.top_k
        factor = smooth_step(1.0 - gap[:, :slots] / eps.clamp(min=1e-30), self.a, self.b)
        factor = factor * is_chosen[:, :slots]
        if self.detach_gate:
            factor = factor.detach()
        weights = self.weighed(logits, order[:, :slots], factor)
        chosen = order[:, :slots].masked_fill(~is_chosen[:, :slots], -1)
        routed = self.routed(logits, chosen, weights)
        if self.theta is None or not self.boundary_coef:
            return routed
        over = num_chosen.to(logits.dtype).mean() - self.budget
        losses = {**routed.losses, "boundary": self.boundary_coef * eps * over}
        return Routed(chosen, weights, logits, losses)

    @torch.no_grad()
    def _follow(self, gap: Float[Tensor, "tokens experts"]) -> None:
        """Take the width that this batch would need into the running mean."""
        assert self.num_seen is not None and self.mean_eps is not None and self.held_eps is not None
        needed = eps_for_budget(gap[:, self.top_k :], self.budget - self.top_k)
        self.num_seen += 1
        # The first batches count alike, so that none is held against a start that means nothing.
        share = max(1.0 - self.decay, 1.0 / int(self.num_seen))
        self.mean_eps += share * (needed.to(self.mean_eps.dtype) - self.mean_eps)
        if int(self.num_seen) % self.every == 0:
            self.held_eps.copy_(self.mean_eps)


class SmoothCosineRouter(SmoothTopKRouter, CosineRouter):
    r"""Cosines :math:`s \cos(P y, u_e)`, smoothed: SmoothGMoE. Options are those of both.

    ``eps`` is in units of the scaled cosines. Source: S0 section 7.3; Li et al. 2022, arXiv
    2206.04046. Oracle in tests: smoothing in NumPy of torch's cosines.
    """


def smooth_step(u: Float[Tensor, "*shape"], a: float, b: float) -> Float[Tensor, "*shape"]:
    r"""s(u), 0 up to u = 0 and 1 from u = 1 on; as the sigmoid of a log u - b log(1 - u).

    The gradient is 0 outside. Source: S0 section 6; docs/theory.md A11.
    """
    inside = (u > 0.0) & (u < 1.0)
    # Outside, what is never looked at must not make a gradient that is no number either.
    safe = torch.where(inside, u, 0.5)
    step = torch.sigmoid(a * safe.log() - b * torch.log1p(-safe))
    return torch.where(inside, step, (u >= 1.0).to(u.dtype))


def eps_for_budget(gap: Float[Tensor, "tokens rest"], extra: float) -> Float[Tensor, ""]:
    r"""The width with which ``extra`` experts more than k come out on average.

    Half way between the m-th and the next of all gaps, m the nearest whole number of tokens times
    ``extra``; 0 for m = 0, just above the largest for all of them.
    Source: docs/theory.md A12. Oracle in tests: NumPy.
    """
    gaps = gap.reshape(-1)
    count = min(round(len(gap) * extra), gaps.numel())
    if count == 0:
        return gaps.new_zeros(())
    if count == gaps.numel():
        return torch.nextafter(gaps.max(), gaps.new_tensor(torch.inf))
    smallest = torch.topk(gaps, count + 1, largest=False, sorted=True).values
    return (smallest[-2] + smallest[-1]) / 2.0


def parameter_groups(model: nn.Module, rate: float, **others: Any) -> Iterable[dict[str, Any]]:
    """Groups for an optimiser: theta of smoothed routers by themselves, at a rate of their own.

    Weight decay would pull theta towards 0, that is eps towards 0.69; ``others`` are settings of
    the other group.
    """
    thetas = [
        module.theta
        for module in model.modules()
        if isinstance(module, SmoothTopKRouter) and module.theta is not None
    ]
    own = {id(theta) for theta in thetas}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in own]
    return [{"params": rest, **others}, {"params": thetas, "lr": rate, "weight_decay": 0.0}]


# ------------------------------------------------------------------------------------- ReLU (ReMoE)
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

    bias: nn.Parameter | None
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
        self.num_layers = num_layers
        self.factor = factor
        self.weight: nn.Parameter = nn.Parameter(torch.randn(num_experts, hidden) * hidden**-0.5)
        self.bias = nn.Parameter(torch.zeros(num_experts)) if has_bias else None
        self.register_buffer("strength", torch.tensor(strength))
        self.register_buffer("sparsity", torch.tensor(torch.nan), persistent=False)

    @property
    def macs_per_token(self) -> int:
        """A row for every expert."""
        return self.num_experts * self.hidden

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
