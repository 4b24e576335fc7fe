r"""Cells and facets of a box: which experts matter there, and what meets it, each proved.

An expert is above another in the whole box :math:`[l, u]` where

.. math:: b_i - b_j + \sum_m \min((w_i - w_j)_m l_m, (w_i - w_j)_m u_m) > 0,

asked of float64 less a bound of its rounding, so that what is said holds. Source: docs/theory.md
G2.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from moegeom.core.shapes import Bool, Float64, Integer
from moegeom.routing_cells.exact.certificate import cell_certificate, facet_certificate
from moegeom.routing_cells.exact.certificate_check import CellPoint, FacetPoint, NoCell, NoFacet

_UNIT, _TINY = 2.0**-53, float(np.finfo(np.float64).tiny)

#: Points of the box whose top k are tried before any linear program.
_POINTS = 4096


@dataclass(frozen=True, eq=False)
class InBox:
    """Which cells and facets meet the open box, and the proof of each answer."""

    cells: tuple[CellPoint | NoCell, ...]
    facets: tuple[FacetPoint | NoFacet, ...]

    @property
    def has_cell(self) -> Bool[np.ndarray, "cells"]:
        """Cells with a point in the box."""
        return np.array([isinstance(proof, CellPoint) for proof in self.cells], bool)

    @property
    def has_facet(self) -> Bool[np.ndarray, "facets"]:
        """Facets with a point in the box."""
        return np.array([isinstance(proof, FacetPoint) for proof in self.facets], bool)


def surely_above(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
    lower: Float64[np.ndarray, "dims"],
    upper: Float64[np.ndarray, "dims"],
) -> Bool[np.ndarray, "experts experts"]:
    """[i, j]: i is above j in the whole box, ends included; False where float64 cannot tell.

    Ends may be infinite: then only where the rows agree in that coordinate or point the right way.
    Oracle in tests: fractions.
    """
    offsets = np.zeros(len(weight)) if bias is None else bias
    found = np.zeros((len(weight), len(weight)), bool)
    with np.errstate(all="ignore"):
        for i in range(len(weight)):
            ahead, free = weight[i] - weight, offsets[i] - offsets
            ends = [np.where(ahead == 0, 0.0, ahead * end) for end in (lower, upper)]
            # rounding is monotone: the least of the rounded products is the rounded least
            least = np.minimum(*ends)
            reach = np.abs(least).sum(axis=1) + np.abs(free)
            found[i] = least.sum(axis=1) + free > _slack(weight.shape[1], reach)
    return found


def _slack(dims: int, reach: np.ndarray) -> np.ndarray:
    """What differences, products and sums of so many terms may lose, underflow included."""
    return 1.01 * (dims + 10) * _UNIT * reach + (dims + 4) * _TINY


def filter_box(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
    expert_sets: Integer[np.ndarray, "cells k"],
    facets: Integer[np.ndarray, "facets 2"],
    out: Integer[np.ndarray, "facets"],
    into: Integer[np.ndarray, "facets"],
    lower: Float64[np.ndarray, "dims"],
    upper: Float64[np.ndarray, "dims"],
    witness: Float64[np.ndarray, "cells dims"] | None = None,
) -> InBox:
    """Which of the cells and of the facets between them meet the open box, each with its proof.

    A facet is a pair of rows of ``expert_sets``, of which the first has ``out`` and the second has
    ``into``. A cell is excluded where one of the others is above a chosen expert in the whole box,
    and proved by ``witness`` or a point of a sample where that lies inside; a facet is excluded
    with one of its cells, and looked for between the points of both. A program decides the rest.

    Raises ValueError as ``cell_certificate``.
    """
    above = surely_above(weight, bias, lower, upper)
    guesses = _sampled(weight, bias, expert_sets.shape[1], lower, upper)
    cells: list[CellPoint | NoCell] = []
    for number, row in enumerate(expert_sets.tolist()):
        excluded = _excluded(above, row)
        if excluded is not None:
            cells.append(excluded)
            continue
        guess = guesses.get(frozenset(row))
        if witness is not None and ((lower < witness[number]) & (witness[number] < upper)).all():
            guess = witness[number]
        cells.append(cell_certificate(weight, bias, row, lower, upper, guess))
    found: list[FacetPoint | NoFacet] = []
    for (first, second), leaves, enters in zip(
        facets.tolist(), out.tolist(), into.tolist(), strict=True
    ):
        both = cells[first], cells[second]
        neighbour = next((proof for proof in both if isinstance(proof, NoCell)), None)
        guess = _crossing(weight, bias, both, leaves, enters)
        found.append(
            facet_certificate(
                weight,
                bias,
                expert_sets[first].tolist(),
                leaves,
                enters,
                lower,
                upper,
                guess,
                neighbour,
            )
        )
    return InBox(tuple(cells), tuple(found))


def _excluded(above: np.ndarray, row: list[int]) -> NoCell | None:
    """A chosen expert with one of the others above it."""
    outside = np.ones(len(above), bool)
    outside[row] = False
    pairs = np.argwhere(above[np.ix_(outside, ~outside)])
    if not len(pairs):
        return None
    j, i = np.flatnonzero(outside)[pairs[0, 0]], np.flatnonzero(~outside)[pairs[0, 1]]
    return NoCell(((int(i), Fraction(1)),), ((int(j), Fraction(1)),))


def _sampled(
    weight: np.ndarray, bias: np.ndarray | None, k: int, lower: np.ndarray, upper: np.ndarray
) -> dict[frozenset[int], np.ndarray]:
    """Expert sets met by a sample of a box without open ends, with the widest margin of each."""
    if not np.isfinite(upper - lower).all() or not 0 < k < len(weight):
        return {}
    points = lower + np.random.default_rng(0).random((_POINTS, len(lower))) * (upper - lower)
    logits = points @ weight.T + (0.0 if bias is None else bias)
    order = np.argsort(-logits, axis=1, kind="stable")
    ends = np.take_along_axis(logits, order[:, [k - 1, k]], axis=1)
    found: dict[frozenset[int], np.ndarray] = {}
    for number in np.argsort(ends[:, 1] - ends[:, 0], kind="stable").tolist():
        found.setdefault(frozenset(order[number, :k].tolist()), points[number])
    return found


def _crossing(
    weight: np.ndarray,
    bias: np.ndarray | None,
    both: tuple[CellPoint | NoCell, CellPoint | NoCell],
    out: int,
    into: int,
) -> np.ndarray | None:
    """Where the pair ties on the way from the point of one cell to that of the other."""
    points = [proof.point for proof in both if isinstance(proof, CellPoint)]
    if len(points) < 2:
        return None
    try:
        start, stop = (np.array([float(x) for x in point]) for point in points)
    except OverflowError:
        return None
    ahead = weight[out] - weight[into]
    free = 0.0 if bias is None else bias[out] - bias[into]
    gaps = ahead @ start + free, ahead @ stop + free
    if not gaps[0] > 0 > gaps[1]:
        return None
    return start + gaps[0] / (gaps[0] - gaps[1]) * (stop - start)
