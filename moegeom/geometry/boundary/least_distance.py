"""The shortest vector that meets some linear inequalities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

#: Residual of the dual problem that counts as 0: no vector meets the inequalities.
_NOTHING_LEFT = 1e-10

_EPSILON = float(np.finfo(np.float64).eps)

_MOST_ROUNDS = 50


@dataclass(frozen=True, eq=False)
class LeastDistance:
    """``point`` meets the inequalities up to rounding, and nothing shorter than ``bound`` does.

    The bound comes from the dual problem, so it holds however exact the point is; it is the length
    of the point up to rounding, or inf (and the point 0) when no vector meets the inequalities.
    """

    point: Float64[np.ndarray, "dims"]
    bound: float


def least_distance(
    normals: Float64[np.ndarray, "constraints dims"],
    offsets: Float64[np.ndarray, "constraints"],
    slack: float,
) -> LeastDistance:
    r"""The x of least :math:`|x|` with :math:`a_c \cdot x \ge o_c` for each constraint c.

    Least distance programming: the nonnegative least-squares problem
    :math:`\min_{v \ge 0} |A^T v|^2 + (o \cdot v - 1)^2` has the residual (r, s) with x = r / s, and
    any :math:`v \ge 0` proves :math:`|x| \ge o \cdot v / |A^T v|`. A normal of zeros asks for
    nothing, or for the impossible when its offset is above ``slack``. When the solver gives up,
    the point is 0 and the bound 0: true, and useless.
    Source: Lawson and Hanson, Solving Least Squares Problems, chapter 23; docs/theory.md A4.
    Oracle in tests: scipy's SLSQP.
    """
    from scipy.optimize import nnls

    origin = np.zeros(normals.shape[1])
    lengths = np.sqrt(np.einsum("cd,cd->c", normals, normals))
    if (offsets[lengths == 0.0] > slack).any():
        return LeastDistance(origin, np.inf)
    binding = lengths > 0.0
    heights = offsets[binding] / lengths[binding]
    farthest = heights.max(initial=0.0)
    if farthest <= 0.0:
        return LeastDistance(origin, 0.0)
    # the farthest single constraint is at distance 1, so that the residual is well scaled
    system = np.vstack([(normals[binding] / lengths[binding, None]).T, heights / farthest])
    target = np.zeros(len(system))
    target[-1] = 1.0
    try:
        dual, residual = nnls(system, target, maxiter=_MOST_ROUNDS * system.shape[1])
    except RuntimeError:
        return LeastDistance(origin, 0.0)
    # what rounding alone leaves where large terms of the dual cancel
    rounding = _EPSILON * system.shape[1] * np.linalg.norm(np.abs(system) @ dual)
    if residual < max(_NOTHING_LEFT, rounding):
        return LeastDistance(origin, np.inf)
    product = system @ dual
    left = target - product
    bound = product[-1] / np.linalg.norm(product[:-1])
    # at the optimum left is at right angles to product: left[-1] = |left|^2, which does not cancel
    return LeastDistance(-left[:-1] / (left @ left) * farthest, float(bound) * farthest)
