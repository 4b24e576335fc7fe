"""Distance from a router input to the nearest one where n + 1 experts tie at the border."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moegeom.core.shapes import Float, Float64
from moegeom.geometry.boundary.linear import squared_row_distances
from moegeom.geometry.boundary.orders import Experts, Flat, NearestOrder, OrderDistance, search_ties

#: Length of what is left of a row difference, relative to the rows, that counts as nothing.
_DEPENDENT = 1e-10

#: Difference of logits, relative to their range, that counts as a tie.
_TIE = 1e-10

MOST_NODES = 20_000


def row_coordinates(
    weight: Float[np.ndarray, "experts hidden"],
) -> Float64[np.ndarray, "experts dims"]:
    """Router rows, less their mean, in an orthonormal basis of a space that holds them.

    At most as many dimensions as experts. Distances between rows are kept up to rounding, and with
    them every distance below; work it out once for a layer.
    """
    rows = weight.astype(np.float64)
    _, triangle = np.linalg.qr((rows - rows.mean(axis=0)).T)
    return triangle.T


def order_distance(
    logits: Float64[np.ndarray, "experts"],
    rows: Float64[np.ndarray, "experts dims"],
    k: int,
    order: int,
    most_nodes: int = MOST_NODES,
    apart: Float64[np.ndarray, "experts experts"] | None = None,
) -> OrderDistance:
    r"""Euclidean distance of one input to the closed set of order n = ``order``, as a bracket.

    An input is of the set when n + 1 experts have the logit of the border between chosen and not
    chosen; for n = 1 it is the boundary. In units of the router input; not decreasing in n; inf for
    k = E, for n >= E, and where rows allow no such tie. ``lower`` is at least the least distance of
    a flat (all of n + 1 experts tie, wherever the others are) and certified even when the search
    ends after ``most_nodes`` steps. Relative error 1e-8, for affine rules. ``rows`` are the router
    rows, or their :func:`row_coordinates`; ``apart`` are the
    distances between them (:func:`rows_apart`), to be worked out once for many tokens.

    Source: docs/theory.md A4. Oracle in tests: SLSQP over every flat and every split of the others.
    """
    return search_ties(_Euclidean.at(logits, rows, apart), logits, k, order, most_nodes)


def rows_apart(rows: Float64[np.ndarray, "experts dims"]) -> Float64[np.ndarray, "experts experts"]:
    """Euclidean distances between rows."""
    return np.sqrt(squared_row_distances(rows))


def flat_distance(
    logits: Float64[np.ndarray, "experts"],
    rows: Float64[np.ndarray, "experts dims"],
    tied: Experts,
) -> float:
    r"""Euclidean distance to the inputs where all of ``tied`` have one logit, others anywhere.

    :math:`\sqrt{d^T (C C^T)^{-1} d}`, C and d the differences of rows and of logits. 0 for fewer
    than two experts; inf when equal or dependent rows forbid the tie. Source: docs/theory.md A4.
    """
    return _Euclidean.at(logits, rows).flat(tied).nearest.bound


@dataclass(frozen=True, eq=False)
class _Along:
    """The nearest point of a flat: logits there, and what is left of the rows along the flat."""

    distance: float
    logits: Float64[np.ndarray, "experts"]
    rows: Float64[np.ndarray, "experts dims"]


@dataclass(frozen=True, eq=False)
class _Euclidean:
    logits: Float64[np.ndarray, "experts"]
    rows: Float64[np.ndarray, "experts dims"]
    apart: Float64[np.ndarray, "experts experts"] | None
    slack: float
    shortest: float

    @classmethod
    def at(
        cls,
        logits: Float64[np.ndarray, "experts"],
        rows: Float64[np.ndarray, "experts dims"],
        apart: Float64[np.ndarray, "experts experts"] | None = None,
    ) -> _Euclidean:
        longest = float(np.sqrt((rows**2).sum(axis=1).max(initial=0.0)))
        slack = _TIE * float(np.ptp(logits)) if len(logits) else 0.0
        return cls(logits, rows, apart, slack, _DEPENDENT * longest)

    @cached_property
    def lengths(self) -> Float64[np.ndarray, "experts experts"]:
        """Distances between rows, nearly equal ones at 0: the search begins with every pair."""
        lengths = rows_apart(self.rows) if self.apart is None else self.apart
        return np.where(lengths <= self.shortest, 0.0, lengths)

    @property
    def pair_costs(self) -> Float64[np.ndarray, "experts experts"]:
        return self._steps(np.abs(self.logits - self.logits[:, None]), self.lengths)

    def flat(self, tied: Experts) -> Flat:
        flat = self._along(tied)
        if flat is None:
            nowhere = NearestOrder(np.inf, np.inf, self.logits)
            return Flat(nowhere, np.full(len(self.logits), np.inf))
        normals, gaps = self._differences(flat, tied[0])
        steps = self._steps(np.abs(gaps), np.sqrt((normals**2).sum(axis=1)))
        nearest = NearestOrder(flat.distance, flat.distance, flat.logits)
        return Flat(nearest, np.hypot(flat.distance, steps))

    def nearest(self, tied: Experts, above: Experts, below: Experts) -> NearestOrder:
        flat = self._along(tied)
        if flat is None:
            return NearestOrder(np.inf, np.inf, self.logits)
        normals, gaps = self._differences(flat, tied[0])
        others = [*above, *below]
        sign = np.repeat([1.0, -1.0], [len(above), len(below)])
        least = least_distance(sign[:, None] * normals[others], -sign * gaps[others], self.slack)
        return NearestOrder(
            float(np.hypot(flat.distance, least.bound)),
            float(np.hypot(flat.distance, np.linalg.norm(least.point))),
            flat.logits + flat.rows @ least.point,
        )

    def _steps(
        self, gaps: Float64[np.ndarray, "*some"], lengths: Float64[np.ndarray, "*some"]
    ) -> Float64[np.ndarray, "*some"]:
        """How far it is until each gap is closed; inf where no step along the flat closes it."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(gaps <= self.slack, 0.0, gaps / lengths)

    def _differences(
        self, flat: _Along, reference: int
    ) -> tuple[Float64[np.ndarray, "experts dims"], Float64[np.ndarray, "experts"]]:
        """Rows and logits less those of a tied expert; what is nearly 0 along the flat is 0."""
        normals = flat.rows - flat.rows[reference]
        normals[(normals**2).sum(axis=1) <= self.shortest**2] = 0.0
        return normals, flat.logits - flat.logits[reference]

    def _along(self, tied: Experts) -> _Along | None:
        """Expert after expert, each by the part of its row that is new; None when there is none."""
        flat = _Along(0.0, self.logits, self.rows)
        for expert in tied[1:]:
            normals, gaps = self._differences(flat, tied[0])
            normal, gap = normals[expert], float(gaps[expert])
            length = float(np.sqrt(normal @ normal))
            if length == 0.0:
                if abs(gap) > self.slack:
                    return None
                continue
            unit, step = normal / length, gap / length
            along = flat.rows @ unit
            flat = _Along(
                float(np.hypot(flat.distance, step)),
                flat.logits - step * along,
                flat.rows - along[:, None] * unit,
            )
        return flat


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
