"""Cells and walls of a walk over the vertices of the order-k diagram, without hashing most of them.

The reference is :func:`moegeom.cells.exact.collected.collected`, which is also what takes walks
with vertices that float64 did not prove.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from moegeom.cells.exact.collected import Cells, collected
from moegeom.cells.walk._level_diagram import diagram_of, points_near
from moegeom.cells.walk._level_vertex import UNORDERED
from moegeom.cells.walk.level_walk import Walked


def level_cells(
    walked: Walked,
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    k: int,
) -> Cells:
    """The cells and walls that meet at the vertices of a whole walk, as ``collected`` gives them.

    Along a direction without pattern each cell and each wall that is bounded below has one lowest
    vertex, which tells from its own edges; only those that hold a ray are looked up. A witness is
    the mean of one vertex and of the ends of the cell's edges there. Source: docs/theory.md G1.
    """
    if not walked.is_simple.all() or (walked.rising & UNORDERED).any():
        return collected(walked.on, walked.above, walked.is_simple, walked.rays, weight, bias, k)
    diagram = diagram_of(walked, walked.rising, k)
    masks, walls = diagram.masks, diagram.walls
    witness = points_near(walked, weight, masks, diagram.vertex_of)
    octets = masks.astype("<u8").view(np.uint8)
    members = np.unpackbits(octets, axis=1, count=len(bias), bitorder="little")
    # of two coalitions the one whose lowest expert outside the other is lower comes first
    ranks = np.packbits(members, axis=1)
    ranks = np.pad(ranks, ((0, 0), (0, -ranks.shape[1] % 8))).view(">u8").astype(np.uint64)
    order = np.lexsort(~ranks.T[::-1]) if ranks.shape[1] > 1 else np.argsort(~ranks[:, 0])
    coalition = np.nonzero(members[order])[1].reshape(len(masks), k)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    pairs = place[walls[:, :2]]
    # walls in the order of their cells, whatever vertex they were found at
    by_cells = np.argsort(pairs[:, 0] * len(order) + pairs[:, 1])
    return Cells(
        coalition=coalition.astype(np.int16),
        witness=witness[order],
        is_bounded=diagram.is_bounded[order],
        is_proved=np.ones(len(order), dtype=bool),
        walls=pairs[by_cells],
        out=walls[by_cells, 2].astype(np.int16),
        into=walls[by_cells, 3].astype(np.int16),
    )
