"""Cells and walls of a whole walk with its ties broken, and points of its cells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt32, UInt64

from moegeom.cells.walk._level_cells import gather_cells, gather_walls, inner_points
from moegeom.cells.walk._level_vertex import NONE, RAY
from moegeom.cells.walk.level_walk import Walked


@dataclass(frozen=True, eq=False)
class Diagram:
    """Cells as bits, a vertex of each, and walls: both cells, the expert that only each has."""

    masks: UInt64[np.ndarray, "cells words"]
    vertex_of: Int64[np.ndarray, "cells"]
    is_bounded: Bool[np.ndarray, "cells"]
    walls: Int64[np.ndarray, "walls 4"]


def diagram_of(walked: Walked, rising: UInt32[np.ndarray, "vertices"], k: int) -> Diagram:
    """Cells and walls that meet at the vertices; ``rising`` as there, proved at all of them."""
    marks = np.random.default_rng(2).integers(1, 2**63, walked.num_experts).astype(np.uint64)
    vertices = walked.on, walked.bits, rising, walked.links
    room, num = len(walked.on) + 64, -1
    while num < 0:
        table, codes = _empty_table(room), np.empty(room, np.uint64)
        masks = np.empty((room, walked.bits.shape[1]), np.uint64)
        vertex_of, is_bounded = np.empty(room, np.int64), np.ones(room, bool)
        num = gather_cells(*vertices, k, marks, table, codes, masks, vertex_of, is_bounded)
        room *= 2
    cells = table, codes[:num], masks[:num]
    room, num_walls = 4 * len(walked.on) + 64, -1
    while num_walls < 0:
        walls = np.empty((room, 4), np.int64)
        num_walls = gather_walls(*vertices, k, marks, *cells, walls, _empty_table(room))
        room *= 2
    return Diagram(masks[:num], vertex_of[:num], is_bounded[:num], walls[:num_walls])


def _empty_table(room: int) -> Int64[np.ndarray, "slots"]:
    return np.full(1 << (2 * room - 1).bit_length(), -1, np.int64)


def points_near(
    walked: Walked,
    weight: Float64[np.ndarray, "experts dims"],
    masks: UInt64[np.ndarray, "cells words"],
    vertex_of: Int64[np.ndarray, "cells"],
) -> Float64[np.ndarray, "cells dims"]:
    """The mean of a vertex of each cell and of the ends of its edges there.

    Inside the cell, but for rounding, where the vertex is simple; of no meaning where it is not.
    """
    is_ray = (walked.links == RAY) & walked.is_simple[:, None]
    vertex, edge = np.nonzero(is_ray)
    ray_of = np.full(walked.links.shape, -1, np.int32)
    ray_of[is_ray] = np.arange(len(vertex))
    # a vertex has several edges without end: each basis is inverted once
    is_new = np.append(True, vertex[1:] != vertex[:-1])[: len(vertex)]
    experts, basis_of = walked.on[vertex[is_new]].astype(np.int64), np.cumsum(is_new) - 1
    basis = np.concatenate([weight[experts], np.full((*experts.shape, 1), -1.0)], axis=2)
    direction = np.linalg.inv(basis)[basis_of, :-1, edge // 2]
    direction *= np.where(edge % 2 == 1, 1.0, -1.0)[:, None]
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    ends = np.where((walked.links == RAY) & ~is_ray, NONE, walked.links)
    found = np.empty((len(masks), weight.shape[1]))
    inner_points(walked.on, walked.point, ends, masks, vertex_of, direction, ray_of, found)
    return found
