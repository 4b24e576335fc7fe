"""Losses that keep routers even and logits small, without coefficients."""

from __future__ import annotations

import torch
from torch import Tensor

from moegeom.core.shapes import Float, Int64


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
