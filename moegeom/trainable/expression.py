"""A projection with orthonormal rows: one expression vector for every expert."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Float
from moegeom.trainable.router import at_least_float32, product

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
        self.weight = nn.Parameter(orthonormal_rows(torch.randn(rows, hidden)))

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
