"""Top-k routing by scores or cosines, the losses that keep it even, and logits less their mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float, Int64
from moegeom.trainable.router import Routed, RouterModule, at_least_float32, descending, product


# ------------------------------------------------------------------------------------------- losses
def balance_loss(
    probability: Float[Tensor, "tokens experts"], load: Int64[Tensor, "experts"]
) -> Float[Tensor, ""]:
    r"""Loss of GShard and Switch, :math:`E \sum_e f_e P_e`; k at balance, at most E for k = 1.

    :math:`f_e` is the share of tokens that chose e (they add up to k) and has no gradient,
    :math:`P_e` the mean probability. nan without tokens. Source: Fedus et al. 2021, arXiv
    2101.03961, equations 4 to 6. Oracle in tests: load_balancing_loss_func of transformers.
    """
    share = load.to(probability.dtype) / len(probability)
    return probability.shape[1] * (share * probability.mean(dim=0)).sum()


def z_loss(logits: Float[Tensor, "tokens experts"]) -> Float[Tensor, ""]:
    r"""Mean over tokens of the square of :math:`\log \sum_e e^{z_e}`; nan without tokens.

    Source: Zoph et al. 2022, arXiv 2202.08906, equation 5. Oracle in tests: scipy's logsumexp.
    """
    return torch.logsumexp(logits, dim=1).square().mean()


def entropy_loss(probability: Float[Tensor, "tokens experts"]) -> Float[Tensor, ""]:
    """Mean entropy of the rows, in nats; 0 log 0 = 0, also in the gradient; nan without tokens.

    Minimised it makes routing sharp. Source: S3 D.2. Oracle in tests: scipy.stats.entropy.
    """
    positive = probability.clamp(min=torch.finfo(probability.dtype).tiny)
    return -(probability * positive.log()).sum(dim=1).mean()


# ------------------------------------------------------------------------------------------- linear
Score = Literal["softmax", "sigmoid"]

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, dim=1),
    "sigmoid": torch.sigmoid,
}

#: Keeps a sum of sigmoids that underflow from being divided by; DeepSeek-V3 adds the same.
LEAST_SUM = 1e-20


class TopKRouter(RouterModule):
    r"""The k experts with the largest logits :math:`W y + b`, or the largest biased scores.

    Weights are the scores of the chosen, divided by their sum with ``renormalise``, times
    ``scale``. In training inputs are multiplied by noise uniform in 1 - ``jitter`` to 1 +
    ``jitter``, and normal noise of deviation ``gate_noise`` / E, as in tutel, is added to the
    logits. ``balance_coef`` and ``z_coef`` weigh the losses ``balance`` and ``z``
    (:mod:`moegeom.trainable.top_k`); for sigmoids probabilities are scores over their sum.

    With a ``bias_rate`` a selection bias, which weights do not hold, is moved by
    :meth:`update_bias` instead of by a gradient. ``row_size`` is for routers that compare
    something else than the input.
    Oracle in tests: the routers of OLMoE, Mixtral and DeepSeek-V3 in transformers.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    selection_bias: Tensor | None

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden: int,
        *,
        score: Score = "softmax",
        renormalise: bool = True,
        scale: float = 1.0,
        has_bias: bool = False,
        balance_coef: float = 0.01,
        z_coef: float = 0.0,
        bias_rate: float = 0.0,
        jitter: float = 0.0,
        gate_noise: float = 0.0,
        row_size: int | None = None,
    ) -> None:
        super().__init__(num_experts, top_k, hidden)
        if score not in _SCORES:
            raise UsageError(
                f"{type(self).__name__}: score is {score!r}, expected {' or '.join(_SCORES)}."
            )
        self.score = score
        self.renormalise = renormalise
        self.scale = scale
        self.balance_coef = balance_coef
        self.z_coef = z_coef
        self.bias_rate = bias_rate
        self.jitter = jitter
        self.gate_noise = gate_noise
        size = row_size or hidden
        # Inputs behind an RMS norm then have logits of variance 1.
        self.weight = nn.Parameter(torch.randn(num_experts, size) * size**-0.5)
        self.bias = nn.Parameter(torch.zeros(num_experts)) if has_bias else None
        self.register_buffer("selection_bias", torch.zeros(num_experts) if bias_rate else None)

    @property
    def macs_per_token(self) -> int:
        """A row for every expert."""
        return self.num_experts * self.hidden

    def scored(self, inputs: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "tokens experts"]:
        """Logits ``W y + b``."""
        tokens = self.jittered(inputs).reshape(-1, self.hidden)
        return self.noisy(product(tokens, self.weight, self.bias))

    def jittered(self, inputs: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """Inputs times noise around 1 in training, else as they are."""
        if not (self.training and self.jitter):
            return inputs
        return inputs * torch.empty_like(inputs).uniform_(1.0 - self.jitter, 1.0 + self.jitter)

    def noisy(self, logits: Float[Tensor, "tokens experts"]) -> Float[Tensor, "tokens experts"]:
        """Logits plus noise in training, else as they are."""
        if not (self.training and self.gate_noise):
            return logits
        return logits + self.gate_noise / self.num_experts * torch.randn_like(logits)

    def selection(self, logits: Float[Tensor, "tokens experts"]) -> Float[Tensor, "tokens experts"]:
        """What experts are compared by: logits, which rounding of scores cannot make equal.

        Behind a selection bias scores plus bias.
        """
        if self.selection_bias is None:
            return logits
        return _SCORES[self.score](logits) + self.selection_bias.to(logits.dtype)

    def choose(self, logits: Float[Tensor, "tokens experts"]) -> Routed:
        """The ``top_k`` largest selection scores; equal ones: the lower number."""
        chosen = descending(self.selection(logits))[1][:, : self.top_k]
        weights = self.weighed(logits, chosen, torch.ones_like(chosen, dtype=logits.dtype))
        return self.routed(logits, chosen, weights)

    def weighed(
        self,
        logits: Float[Tensor, "tokens experts"],
        chosen: Int64[Tensor, "tokens slots"],
        factor: Float[Tensor, "tokens slots"],
    ) -> Float[Tensor, "tokens slots"]:
        """Weights of experts whose scores are multiplied by a factor first."""
        weights = _SCORES[self.score](logits).gather(1, chosen) * factor
        if self.renormalise:
            weights = weights / (weights.sum(dim=1, keepdim=True) + LEAST_SUM)
        return weights * self.scale

    def routed(
        self,
        logits: Float[Tensor, "tokens experts"],
        chosen: Int64[Tensor, "tokens slots"],
        weights: Float[Tensor, "tokens slots"],
    ) -> Routed:
        """The record, with the losses that have a coefficient."""
        bare = Routed(chosen, weights, logits)
        losses: dict[str, Tensor] = {}
        if self.balance_coef:
            scores = _SCORES[self.score](logits)
            probability = scores / (scores.sum(dim=1, keepdim=True) + LEAST_SUM)
            losses["balance"] = self.balance_coef * balance_loss(probability, bare.load)
        if self.z_coef:
            losses["z"] = self.z_coef * z_loss(logits)
        return Routed(chosen, weights, logits, losses)

    @torch.no_grad()
    def update_bias(self, load: Int64[Tensor, "experts"] | Float[Tensor, "experts"]) -> None:
        r"""After a step: :math:`b_e \leftarrow b_e + r\,\mathrm{sign}(\bar c - c_e)` of the load c,
        or of a running mean of loads.

        Of several processes the loads are to be summed before. A load at the mean moves nothing.

        Raises
        ------
        UsageError
            Without a ``bias_rate``, or where the bias was put into less than float32, which steps
            of a thousandth do not survive.
        Source: Wang et al. 2024, arXiv 2408.15664, algorithm 1.
        Oracle in tests: loads worked by hand.
        """
        if self.selection_bias is None:
            raise UsageError(
                f"{type(self).__name__}: has no selection bias to update.", "Set a bias_rate."
            )
        dtype = self.selection_bias.dtype
        if at_least_float32(self.selection_bias) != dtype:
            raise UsageError(
                f"{type(self).__name__}: its selection bias is {dtype}, in which updates are lost.",
                "Keep it in float32: router.selection_bias = router.selection_bias.float().",
            )
        counts = load.to(dtype)
        self.selection_bias += self.bias_rate * torch.sign(counts.mean() - counts)


# ------------------------------------------------------------------------------------------ cosines
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
        self.projection: nn.Parameter = nn.Parameter(torch.randn(projected, hidden) * hidden**-0.5)
        self.log_scale: nn.Parameter = nn.Parameter(torch.tensor([math.log(scale_of_cosines)]))

    @property
    def macs_per_token(self) -> int:
        """The projection, and a row of it for every expert."""
        return len(self.projection) * (self.hidden + self.num_experts)

    def scored(self, inputs: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "tokens experts"]:
        """Cosines times the scale, plus the bias where there is one."""
        projected = product(self.jittered(inputs).reshape(-1, self.hidden), self.projection)
        unit = nn.functional.normalize(projected, dim=1, eps=1e-12)
        rows = nn.functional.normalize(self.weight.to(unit.dtype), dim=1, eps=1e-12)
        scale = self.log_scale.to(unit.dtype).clamp(max=math.log(LARGEST_SCALE)).exp()
        logits = product(unit, rows) * scale
        return self.noisy(logits if self.bias is None else logits + self.bias.to(logits.dtype))


# ------------------------------------------------------------------------------------ less the mean
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
        self.router = router
        self.decay = decay
        self.register_buffer("logit_bias", torch.zeros(router.num_experts))
        self.register_buffer("num_seen", torch.tensor(0))

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
