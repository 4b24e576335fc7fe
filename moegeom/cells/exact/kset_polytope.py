r"""Cells as vertices: the polytope of sums of k experts, and the sum of the k largest logits.

.. math:: Q_k = \mathrm{conv}\{\textstyle\sum_{i \in S} (w_i, b_i) : |S| = k\}, \qquad
   e_k(x) = \max_{|S| = k} \sum_{i \in S} z_i(x) = \max_{v \in Q_k} \langle v, (x, 1) \rangle

The normal cone of a vertex, cut at the height 1, is the closure of a cell: cells of (W, b) are the
vertices that are seen from above, those of (W, -b) the ones from below; walls are edges. Without
biases every vertex is a cell. On a cell :math:`e_k` is linear with the vertex as its coefficients.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64, Integer


def kset_vertices(
    coalition: Integer[np.ndarray, "cells k"],
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
) -> Float64[np.ndarray, "cells coordinates"]:
    r"""The vertex :math:`\sum_{i \in S} (w_i, b_i)` of each cell; without its last entry for None.

    The slope and the offset of the sum of the k largest logits on the cell. Sums are correctly
    rounded. Source: Andrzejak & Fukuda 1999 (k-set polytope); oracle in tests: Qhull's hull of all
    sums.
    """
    rows = weight if bias is None else np.column_stack([weight, bias])
    found = np.empty((len(coalition), rows.shape[1]))
    for cell, experts in enumerate(coalition):
        found[cell] = [math.fsum(column) for column in rows[experts].T]
    return found


def largest_sum(
    vertices: Float64[np.ndarray, "cells coordinates"],
    inputs: Float64[np.ndarray, "inputs dims"],
) -> Float64[np.ndarray, "inputs"]:
    """The sum of the k largest logits at each input, by the cells alone: the largest over them.

    ``vertices`` of a complete list of cells, with or without the coordinate of the bias. Oracle in
    tests: the logits sorted.
    """
    dims = inputs.shape[1]
    values = inputs @ vertices[:, :dims].T
    if vertices.shape[1] > dims:
        values += vertices[:, dims]
    return values.max(axis=1)
