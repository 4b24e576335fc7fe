"""Cells by asking about every set of k experts: fastest where there are few sets, in any dimension.

The reference is :func:`moegeom.studies.cells.exact.certificate.cell_certificate`, which also takes
what float64 does not prove.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb

import numpy as np
from jaxtyping import Bool, Float64, Int16

from moegeom.studies.cells.ball._cell_answer import EMPTY, ball_around
from moegeom.studies.cells.ball.cell_distance import cell_distance
from moegeom.studies.cells.exact.certificate import cell_certificate
from moegeom.studies.cells.exact.certificate_check import CellPoint

#: Sets that are asked about at most, and at a time.
MOST_SUBSETS, _CHUNK = 10**6, 4096

_UNIT = 2.0**-53


@dataclass(frozen=True, eq=False)
class SubsetCells:
    """Cells in the order of their sorted experts, and a point strictly inside each.

    ``num_exact`` sets were decided in exact arithmetic.
    """

    expert_set: Int16[np.ndarray, "cells k"]
    witness: Float64[np.ndarray, "cells dims"]
    num_exact: int


def subset_cells(
    weight: Float64[np.ndarray, "experts dims"], bias: Float64[np.ndarray, "experts"], k: int
) -> SubsetCells:
    """Every strict cell, without facets: one quadratic program for each of the C(E, k) sets.

    A set is a cell where a point is found at which float64 proves it ahead, none where weights of
    Farkas are proved; the others are certified exactly. Some microseconds a set, whatever the
    dimension is: ahead of a walk where nearly every set is a cell. Raises ValueError for k outside
    1..E and more than ``MOST_SUBSETS`` sets. Source: docs/theory.md G1; oracle in tests: the walk.
    """
    experts = len(weight)
    if not 1 <= k <= experts:
        raise ValueError(f"top_k {k} of {experts} experts")
    if comb(experts, k) > MOST_SUBSETS:
        raise ValueError(f"{comb(experts, k)} sets of experts; at most {MOST_SUBSETS} are tried")
    scale = max(float(np.abs(bias).max()), 1e-300) / max(float(np.abs(weight).max()), 1e-300)
    ball = ball_around(weight, bias, 0.0, np.inf, scale)
    sets, points, num_exact = [], [], 0
    for chunk in _chunks(experts, k):
        inside = np.zeros((len(chunk), experts), dtype=bool)
        np.put_along_axis(inside, chunk, True, axis=1)
        none = np.full((len(chunk), 2), -1, np.int64)
        found = cell_distance(ball, inside, none)
        is_cell = _is_ahead(weight, bias, inside, found.step)
        witness = found.step
        for row in np.flatnonzero(~is_cell & (found.state != EMPTY)).tolist():
            num_exact += 1
            proof = cell_certificate(weight, bias, chunk[row].tolist())
            if isinstance(proof, CellPoint):
                is_cell[row] = True
                witness[row] = [float(value) for value in proof.point]
        sets.append(chunk[is_cell])
        points.append(witness[is_cell])
    return SubsetCells(np.concatenate(sets).astype(np.int16), np.concatenate(points), num_exact)


def _chunks(experts: int, k: int) -> Iterator[np.ndarray]:
    listed = combinations(range(experts), k)
    while chunk := list(islice(listed, _CHUNK)):
        yield np.array(chunk, np.int64)


def _is_ahead(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    inside: Bool[np.ndarray, "sets experts"],
    points: Float64[np.ndarray, "sets dims"],
) -> Bool[np.ndarray, "sets"]:
    """Whether the points, which may be nan, prove the sets ahead, whatever rounding does."""
    logits = points @ weight.T + bias
    slack = (
        1.01 * (weight.shape[1] + 2) * _UNIT * (np.abs(points) @ np.abs(weight.T) + np.abs(bias))
    )
    least = np.where(inside, logits - slack, np.inf).min(axis=1)
    most = np.where(inside, -np.inf, logits + slack).max(axis=1)
    return least > most
