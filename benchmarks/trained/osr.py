"""Sinkhorn routing with a cost that repels experts (OSR): balanced in training, causal after it."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float
from moegeom.trainable.router import (
    Routed,
    RouterModule,
    at_least_float32,
    cosine,
    descending,
    product,
)
from moegeom.trainable.top_k import entropy_loss

# ------------------------------------------------------------------------------- expression vectors
#: Lengths of rows and their cosines are this near to 1 and 0 in float64 when steps end.
_CLOSE = 1e-12

#: Steps after which a matrix is given up: the smallest singular value is 1e-15 of the largest.
_MOST_STEPS = 100


class ExpressionProjector(nn.Module):
    r"""Expression vectors :math:`W y`, with rows of W that start orthonormal.

    With ``keep="start"`` training may move the rows apart, and :meth:`loss` pulls them back; with
    ``keep="always"`` the rows are made orthonormal in every pass, which costs
    :func:`steps_for_start` steps of two products of (rows, rows, hidden) and is differentiable.
    Raises UsageError where there are more rows than inputs: they cannot be orthonormal.
    Source: S3 A.3, D.3. Oracle in tests: scipy.linalg.polar.
    """

    def __init__(
        self, hidden: int, rows: int, *, keep: Literal["start", "always"] = "start"
    ) -> None:
        super().__init__()
        if not 1 <= rows <= hidden:
            raise UsageError(
                f"ExpressionProjector: {rows} rows of {hidden} numbers, expected 1 to {hidden} "
                "rows, since more cannot be orthonormal.",
                "Choose num_experts times router_dim no larger than hidden.",
            )
        if keep not in ("start", "always"):
            raise UsageError(f"ExpressionProjector: keep is {keep!r}, expected start or always.")
        self.keep = keep
        self.weight: nn.Parameter = nn.Parameter(orthonormal_rows(torch.randn(rows, hidden)))

    def forward(self, inputs: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch rows"]:
        """The vectors of every expert, one after the other."""
        return product(inputs, self.rows())

    def rows(self) -> Float[Tensor, "rows hidden"]:
        """The rows that inputs are compared with."""
        if self.keep == "start":
            return self.weight
        return newton_schulz(self._wide(), steps_for_start(len(self.weight)))

    def loss(self) -> Float[Tensor, ""]:
        r""":math:`\|W W^\top - I\|_F^2` of the stored rows; gradient :math:`4 (W W^\top - I) W`."""
        gram = self._wide() @ self._wide().T
        return (gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).square().sum()

    def _wide(self) -> Tensor:
        return self.weight.to(at_least_float32(self.weight))


def newton_schulz(
    matrix: Float[Tensor, "rows columns"], steps: int
) -> Float[Tensor, "rows columns"]:
    r"""The nearest matrix with orthonormal rows, after so many steps.

    :math:`X_0 = A / \|A\|_F`, then :math:`X \leftarrow \tfrac32 X - \tfrac12 X X^\top X`: singular
    values go to 1, singular vectors stay. About :math:`\log_{1.5} (\|A\|_F / \sigma_{\min}) + 5`
    steps reach rounding; a matrix of lower rank keeps its rank. nan for zeros.
    Source: docs/theory.md D2. Oracle in tests: scipy.linalg.polar.
    """
    x = matrix / torch.linalg.matrix_norm(matrix)
    for _ in range(steps):
        x = 1.5 * x - 0.5 * (x @ x.T) @ x
    return x


def steps_for_start(rows: int) -> int:
    """Steps that rows near orthonormal need: their singular values begin at rows^-1/2."""
    return math.ceil(math.log(rows) / (2.0 * math.log(1.5))) + 6


def orthonormal_rows(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """The same by as many steps as it takes, in float64, rounded to the dtype of the matrix.

    Raises
    ------
    UsageError
        For a matrix whose rows are dependent.
    """
    x, steps = newton_schulz(matrix.double(), 5), 5
    unit = torch.eye(len(x), dtype=x.dtype, device=x.device)
    while not float((x @ x.T - unit).abs().max()) < _CLOSE:
        if steps >= _MOST_STEPS:
            raise UsageError("orthonormal_rows: rows are dependent, and stay so.")
        x, steps = 1.5 * x - 0.5 * (x @ x.T) @ x, steps + 1
    return x.to(matrix.dtype)


# ------------------------------------------------------------------------------------------ routing
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
        self.router_dim = router_dim
        self.eps = eps
        self.steps = steps
        self.decay = decay
        self.repulsion = repulsion
        self.overconfidence = overconfidence
        self.threshold = threshold
        self.ortho_coef = ortho_coef
        self.entropy_coef = entropy_coef
        self.balanced_at_inference = balanced_at_inference
        rows = num_experts * router_dim
        self.weight: nn.Parameter = nn.Parameter(torch.randn(rows, hidden) * hidden**-0.5)
        self.projector: ExpressionProjector = ExpressionProjector(hidden, rows)
        self.register_buffer("expression_mean", torch.zeros(num_experts, router_dim))

    @property
    def token_local(self) -> bool:
        """Whether a choice follows from its token alone, in the mode the module is in."""
        return not (self.training or self.balanced_at_inference)

    @property
    def macs_per_token(self) -> int:
        """Two projections and the repulsion: scaling the plan has no products of matrices."""
        one = self.num_experts * self.hidden * self.router_dim
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
