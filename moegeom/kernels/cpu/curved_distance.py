"""Distance to the boundary of a cell with curved or grouped walls, or bounds of it.

Scores of one logit without groups have an exact distance, within a certified bracket; groups and
softmax scores have bounds.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from moegeom.geometry.boundary.curved_rows import CurvedRows
from moegeom.kernels.cpu.curved.barriers import empty_tally
from moegeom.kernels.cpu.curved.grouped_distance import grouped
from moegeom.kernels.cpu.curved.token_scores import grouping_of, scratch_for
from moegeom.kernels.cpu.curved.walls import load_token, nearest_wall, walls_of, work_for


@njit(nogil=True, cache=True, error_model="numpy")
def _separable(walls, work, logits, chosen, lower, upper, pair):
    for token in range(logits.shape[0]):
        load_token(walls, logits[token], work)
        for expert in range(logits.shape[1]):
            work.is_open[expert] = True
        for rank in range(chosen.shape[1]):
            work.is_open[chosen[token, rank]] = False
        found = nearest_wall(walls, work, chosen[token])
        lower[token] = found[0]
        upper[token] = found[1]
        pair[token, 0] = found[2]
        pair[token, 1] = found[3]


def curved_distance(
    logits: np.ndarray, chosen: np.ndarray, rows: CurvedRows
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower and upper bound of the distance, nearest wall (expert out, expert in)."""
    lower, upper = np.empty(len(logits)), np.empty(len(logits))
    pair = np.empty((len(logits), 2), dtype=np.int32)
    walls, work = walls_of(rows), work_for(rows.num_experts)
    # one layout and type of arguments: each further one would be compiled apart
    arguments = (logits.astype(np.float64, order="C"), chosen.astype(np.int64, order="C"))
    found = (*arguments, lower, upper, pair)
    if rows.is_separable:
        _separable(walls, work, *found)
    else:
        groups = grouping_of(rows)
        scratch = scratch_for(rows.num_experts, groups.num_groups)
        grouped(walls, groups, work, scratch, empty_tally(), *found)
    return lower, upper, pair
