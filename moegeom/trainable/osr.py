"""Sinkhorn routing with a cost that repels experts (OSR): balanced in training, causal after it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float
from moegeom.geometry.capacity import router_macs
from moegeom.trainable.expression import ExpressionProjector
from moegeom.trainable.gru import cosine
from moegeom.trainable.losses import entropy_loss
from moegeom.trainable.router import Routed, RouterModule, at_least_float32, descending, product

#: Costs over eps are cut off here, as S3 A.3.2 prescribes.
LARGEST_EXPONENT = 50.0


class OSRRouter(RouterModule):
    r"""The k experts of the largest entries of a transport plan of the batch.

    Similarities are cosines of a routing vector :math:`V_e y` and an expression vector
    :math:`W_e y` of ``router_dim`` numbers; :func:`repulsive_cost` turns them into costs C, and in
    training :func:`sinkhorn` turns -C / ``eps`` into a plan of the tokens of the batch. That is not
    causal, and alone a token would have all experts alike; in evaluation the plan is the softmax of
    -C / eps of each token, unless ``balanced_at_inference``. Weights are the entries of the chosen
    over their sum.

    Which experts are alike is told by a running mean of expression vectors with ``decay``, from the
    batches before this one and without gradient, so that no token sees another through it. Losses:
    ``ortho`` (of the projector) and ``entropy`` (of the plan).
    Source: S3 A.3, D.2; docs/theory.md D2. Oracle in tests: the plan by scipy, costs in NumPy.
    """

    expression_mean: Tensor

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden: int,
        *,
        router_dim: int = 128,
        eps: float = 0.05,
        steps: int = 3,
        repulsion: float = 0.5,
        overconfidence: float = 0.5,
        threshold: float = 0.7,
        decay: float = 0.99,
        ortho_coef: float = 0.01,
        entropy_coef: float = 0.1,
        balanced_at_inference: bool = False,
    ) -> None:
        super().__init__(num_experts, top_k, hidden)
        if eps <= 0.0 or steps < 0 or not 0.0 <= decay < 1.0:
            raise UsageError(
                f"OSRRouter: eps {eps:g}, steps {steps}, decay {decay:g}; expected a positive eps, "
                "steps from 0 on and a decay below 1."
            )
        self.router_dim, self.eps, self.steps, self.decay = router_dim, eps, steps, decay
        self.repulsion, self.overconfidence, self.threshold = repulsion, overconfidence, threshold
        self.ortho_coef, self.entropy_coef = ortho_coef, entropy_coef
        self.balanced_at_inference = balanced_at_inference
        rows = num_experts * router_dim
        self.weight = nn.Parameter(torch.randn(rows, hidden) * hidden**-0.5)
        self.projector = ExpressionProjector(hidden, rows)
        self.register_buffer("expression_mean", torch.zeros(num_experts, router_dim))

    @property
    def token_local(self) -> bool:
        """Whether a choice follows from its token alone, in the mode the module is in."""
        return not (self.training or self.balanced_at_inference)

    @property
    def macs_per_token(self) -> int:
        """Two projections and the repulsion: scaling the plan has no products of matrices."""
        one = router_macs(self.num_experts, self.hidden, self.router_dim).projector
        return 2 * one + self.num_experts**2

    def scored(self, inputs: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "tokens experts"]:
        """-C / eps, cut off at -50 and 50."""
        tokens = inputs.reshape(-1, self.hidden)
        of_expert = (-1, self.num_experts, self.router_dim)
        expression = self.projector(tokens).reshape(of_expert)
        similarity = cosine(product(tokens, self.weight).reshape(of_expert), expression)
        cost = repulsive_cost(
            similarity,
            self.expression_mean.to(similarity.dtype),
            self.repulsion,
            self.overconfidence,
            self.threshold,
        )
        if self.training:
            with torch.no_grad():
                mean = expression.mean(dim=0).to(self.expression_mean.dtype)
                self.expression_mean.lerp_(mean, 1.0 - self.decay)
        return (-cost / self.eps).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)

    def choose(self, logits: Float[Tensor, "tokens experts"]) -> Routed:
        """The k largest entries of the plan."""
        steps = 0 if self.token_local else self.steps
        plan = sinkhorn(logits, steps)
        values, order = descending(plan)
        weights = values[:, : self.top_k]
        weights = weights / weights.sum(dim=1, keepdim=True)
        losses: dict[str, Tensor] = {}
        if self.ortho_coef:
            losses["ortho"] = self.ortho_coef * self.projector.loss().to(at_least_float32(logits))
        if self.entropy_coef:
            losses["entropy"] = self.entropy_coef * entropy_loss(plan)
        return Routed(order[:, : self.top_k], weights, logits, losses)


def repulsive_cost(
    similarity: Float[Tensor, "tokens experts"],
    expression: Float[Tensor, "experts size"],
    repulsion: float,
    overconfidence: float,
    threshold: float,
) -> Float[Tensor, "tokens experts"]:
    r""":math:`C = -S + \lambda\, |S| R + \beta \max(|S| - \tau, 0)^2`.

    R holds the squares of the cosines of different experts, 0 on its diagonal; a row of zeros has
    cosine 0 with every other. Experts with equal columns and rows have equal costs and gradients:
    the cost cannot separate them. Source: S3 A.3.1; docs/theory.md D2. Oracle in tests: NumPy.
    """
    unit = nn.functional.normalize(expression, dim=1, eps=1e-12)
    gram = unit @ unit.T
    squares = (gram - torch.diag(gram.diagonal())).square()
    size = similarity.abs()
    over = torch.relu(size - threshold).square()
    return -similarity + repulsion * size @ squares + overconfidence * over


def sinkhorn(
    logits: Float[Tensor, "tokens experts"], steps: int
) -> Float[Tensor, "tokens experts"]:
    r"""The plan after ``steps`` scalings of rows to 1 and columns to T / E, and of rows once more.

    Rows add up to 1, columns nearly to T / E. Without steps the softmax of each row; of one token
    and a step or more, 1 / E everywhere. In logarithms.
    Source: S3 A.3.2; docs/theory.md D2. Oracle in tests: linear programs, the plain iteration.
    """
    for _ in range(steps):
        logits = torch.log_softmax(logits, dim=1)
        # T / E, a factor of all entries, falls out when rows are scaled.
        logits = torch.log_softmax(logits, dim=0)
    return torch.softmax(logits, dim=1)
