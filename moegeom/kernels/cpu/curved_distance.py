"""Distance to the boundary of a cell with curved or grouped boundaries, or bounds of it."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32
from numba import njit

from moegeom.geometry.boundary.curved_rows import CurvedRows
from moegeom.kernels.cpu.curved.boundaries import (
    boundaries_of,
    fill,
    load_token,
    nearest_boundary,
    work_for,
)
from moegeom.kernels.cpu.curved.grouped import bracket


@njit(nogil=True, cache=True, error_model="numpy")
def _separable(boundaries, work, logits, chosen, lower, upper, pair):
    for token in range(logits.shape[0]):
        load_token(boundaries, logits[token], work)
        fill(work.is_open, True)
        for rank in range(chosen.shape[1]):
            work.is_open[chosen[token, rank]] = False
        found = nearest_boundary(boundaries, work, chosen[token])
        lower[token], upper[token], pair[token, 0], pair[token, 1] = found[:4]


@njit(nogil=True, cache=True, error_model="numpy")
def _bounded(boundaries, work, logits, chosen, lower, upper, pair):
    for token in range(logits.shape[0]):
        lower[token], upper[token] = bracket(boundaries, work, logits[token], chosen[token])
        pair[token, 0], pair[token, 1] = work.pair[0], work.pair[1]


def curved_distance(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rows: CurvedRows,
) -> tuple[
    Float64[np.ndarray, "tokens"], Float64[np.ndarray, "tokens"], Int32[np.ndarray, "tokens 2"]
]:
    r"""Lower and upper bound of the distance, and the nearest boundary (expert out, expert in).

    ``chosen`` is what the rule of ``rows`` makes of ``logits``, in descending order. In units of
    the router input. For scores of one logit without groups,

    .. math:: d(y) = \min_{i \in S,\, j \notin S} d_{ij}, \quad
        d_{ij} = \min \{|y' - y| : f(z_i') + c_i = f(z_j') + c_j\}

    which holds for every increasing f, because the way to another choice crosses some such
    boundary; each d_ij is certified: ``lower >= (1 - 1e-6) upper``, up to the rounding of logits
    and scores. 0 on a boundary and on a permanent tie (equal rows, biases and selection biases);
    inf when every expert is chosen, or no pair can ever tie. Pairs with equal selection biases have
    linear boundaries, those of docs/theory.md A3.

    Groups and softmax have bounds: nothing changes nearer than ``lower``, and the rule chooses
    another set after some step of length ``upper``, which is inf if none is found. 0 and 0 where
    the set is not what the rule makes of these logits: a tie up to rounding. The pair is -1, -1
    where no boundary exists or the nearest one is not known.

    The input is free to go anywhere: behind a norm it stays on an ellipsoid, and the distance along
    that is no less (docs/theory.md E3).

    Source: docs/theory.md E1, E1b, E2. Oracle in tests: SLSQP on every boundary, the boundary of
    two rows as a function of one logit, and dense searches for another choice.
    """
    lower, upper = np.empty(len(logits)), np.empty(len(logits))
    pair = np.empty((len(logits), 2), dtype=np.int32)
    boundaries = boundaries_of(rows)
    # one layout and type of arguments: each further one would be compiled apart
    arguments = (logits.astype(np.float64, order="C"), chosen.astype(np.int64, order="C"))
    loop = _separable if rows.is_separable else _bounded
    loop(boundaries, work_for(boundaries), *arguments, lower, upper, pair)
    return lower, upper, pair
