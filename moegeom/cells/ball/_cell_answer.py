"""What is known of a cell or wall: a search, and what its outcome proves."""

from __future__ import annotations

import numpy as np
from numba import njit

from moegeom.cells.ball._cell_bounds import is_empty, lower_bound, upper_bound
from moegeom.cells.ball._cell_search import CONTRADICTED, SOLVED, STUCK, search
from moegeom.kernels.cpu._inner import INNER

#: What is known: nothing; that the open ball is met in full dimension; that it is not; that there
#: is no such cell or wall at all.
OPEN, MET, BEYOND, EMPTY = 0, 1, 2, 3

_UNIT = 2.0**-53


@njit(**INNER)
def excluded(
    rows,
    columns,
    shift,
    logits,
    pairs,
    multipliers,
    step,
    basis,
    upper,
    height,
    share,
    away,
    k,
    out,
    into,
    radius,
    error,
    greatest,
    longest,
):
    """BEYOND, EMPTY or OPEN with a lower bound; whether the search was solved; active pairs.

    ``error`` bounds that of the logits at the centre, ``greatest`` the logits themselves,
    ``longest`` the length of rows.
    """
    dims = len(step)
    slack = 4.0 * (dims + 4) * _UNIT
    rounding, reach = 2.0 * error + slack * greatest, (radius * (1.0 + 1e-9)) ** 2
    ended, q = search(
        rows,
        columns,
        shift,
        logits,
        pairs,
        multipliers,
        basis,
        upper,
        height,
        share,
        away,
        step,
        k,
        out,
        into,
        reach,
        rounding,
        slack * longest,
    )
    fixed = 1 if out >= 0 and into >= 0 else 0
    if ended == STUCK:
        return OPEN, 0.0, False, q
    if ended == CONTRADICTED and radius == np.inf:
        if is_empty(rows, shift, pairs, multipliers, basis, upper, q, fixed, error):
            return EMPTY, np.inf, False, q
        return OPEN, 0.0, False, q
    lower = lower_bound(rows, shift, pairs, multipliers, q, fixed, error)
    if lower >= radius:
        return BEYOND, lower, False, q
    return OPEN, lower, ended == SOLVED, q


@njit(**INNER)
def answer(
    rows,
    columns,
    shift,
    logits,
    pairs,
    multipliers,
    step,
    moved,
    basis,
    upper,
    height,
    share,
    away,
    direction,
    k,
    out,
    into,
    radius,
    scale,
    error,
    greatest,
    longest,
):
    """What is known of a cell, or of a wall where out >= 0; its bracket, and the active pairs.

    For MET, ``moved`` is a step into the relative interior, or no
    farther from it than rounding takes.
    """
    state, lower, is_solved, q = excluded(
        rows,
        columns,
        shift,
        logits,
        pairs,
        multipliers,
        step,
        basis,
        upper,
        height,
        share,
        away,
        k,
        out,
        into,
        radius,
        error,
        greatest,
        longest,
    )
    if state != OPEN or not is_solved:
        return state, lower, np.inf, q
    bound = upper_bound(
        rows,
        columns,
        shift,
        logits,
        step,
        basis,
        upper,
        height,
        share,
        away,
        direction,
        moved,
        k,
        out,
        into,
        scale,
        error,
        greatest,
        longest,
    )
    if bound < radius:
        return MET, min(lower, bound), bound, q
    return OPEN, lower, bound, q
