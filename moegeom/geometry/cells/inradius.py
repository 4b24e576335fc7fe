"""The largest ball inside a cell."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int16, Int64
from scipy.optimize import linprog

from moegeom.geometry.cells.polygons import half_planes


def inradii(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    coalition: Int16[np.ndarray, "cells k"],
    walls: Int64[np.ndarray, "walls 2"],
) -> Float64[np.ndarray, "cells"]:
    r"""Radius of the largest ball in each cell, :math:`\max r: a_w x + c_w \ge r |a_w|`.

    One linear program per cell over its walls (scipy, HiGHS; relative error 1e-7); inf for a cell
    that holds balls of any size. Source: the Chebyshev centre; oracle in tests: distances of the
    centre found to all pairs of experts.
    """
    normal, offset = half_planes(weight, bias, coalition, walls)
    length = np.linalg.norm(normal, axis=1)
    sides: list[list[int]] = [[] for _ in coalition]
    for number, (one, other) in enumerate(walls.tolist()):
        sides[one].append(number)
        sides[other].append(number)
    found = np.full(len(coalition), np.inf)
    dims = weight.shape[1]
    aim = np.append(np.zeros(dims), -1.0)
    for cell, own in enumerate(sides):
        if not own:
            continue
        sign = np.where(walls[own, 0] == cell, 1.0, -1.0)
        away = -sign[:, None] * normal[own] / length[own, None]
        rows = np.column_stack([away, np.ones(len(own))])
        limits = sign * offset[own] / length[own]
        solved = linprog(aim, rows, limits, bounds=[(None, None)] * dims + [(0.0, None)])
        # unbounded: balls of any size fit
        found[cell] = float(solved.x[-1]) if solved.status == 0 else np.inf
    return found
