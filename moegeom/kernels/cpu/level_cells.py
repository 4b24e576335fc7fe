"""Cells and walls of a walk over the vertices of the order-k diagram, without hashing most of them.

The reference is :func:`moegeom.geometry.cells.collected.collected`, which is also what takes walks
with vertices that float64 did not prove.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int32

from moegeom.geometry.cells.collected import Cells, collected
from moegeom.kernels.cpu._level_cells import gather_cells, gather_walls, inner_points
from moegeom.kernels.cpu._level_vertex import RAY, UNORDERED
from moegeom.kernels.cpu.level_walk import Walked


def level_cells(
    walked: Walked,
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    k: int,
) -> Cells:
    """The cells and walls that meet at the vertices of a whole walk, as ``collected`` gives them.

    Along a direction without pattern each cell and each wall that is bounded below has one lowest
    vertex, which tells from its own edges; only those that hold a ray are looked up. A witness is
    the mean of one vertex and of the ends of the cell's edges there. Source: CELLS.md section 1.
    """
    if not walked.is_simple.all() or (walked.rising & UNORDERED).any():
        return collected(walked.on, walked.above, walked.is_simple, walked.rays, weight, bias, k)
    marks = np.random.default_rng(2).integers(1, 2**63, len(bias)).astype(np.uint64)
    table, codes, masks, vertex_of, is_bounded = _gathered_cells(walked, k, marks)
    walls = _gathered_walls(walked, k, marks, table, codes, masks)
    direction, ray_of = _rays(walked, weight)
    witness = np.empty((len(masks), weight.shape[1]))
    inner_points(
        walked.on, walked.point, walked.links, masks, vertex_of, direction, ray_of, witness
    )
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
        is_bounded=is_bounded[order],
        is_proved=np.ones(len(order), dtype=bool),
        walls=pairs[by_cells],
        out=walls[by_cells, 2].astype(np.int16),
        into=walls[by_cells, 3].astype(np.int16),
    )


def _gathered_cells(walked: Walked, k: int, marks: np.ndarray) -> tuple[np.ndarray, ...]:
    room = len(walked.on) + 64
    while True:
        table = np.full(1 << (2 * room - 1).bit_length(), -1, np.int64)
        codes, vertex_of = np.empty(room, np.uint64), np.empty(room, np.int64)
        masks, is_bounded = np.empty((room, walked.bits.shape[1]), np.uint64), np.ones(room, bool)
        num = gather_cells(
            walked.on, walked.bits, walked.rising, walked.links, k, marks,
            table, codes, masks, vertex_of, is_bounded,
        )  # fmt: skip
        if num >= 0:
            return table, codes[:num], masks[:num], vertex_of[:num], is_bounded[:num]
        room *= 2


def _gathered_walls(
    walked: Walked,
    k: int,
    marks: np.ndarray,
    table: np.ndarray,
    codes: np.ndarray,
    masks: np.ndarray,
) -> np.ndarray:
    room = 4 * len(walked.on) + 64
    while True:
        walls = np.empty((room, 4), np.int64)
        seen = np.full(1 << (2 * room - 1).bit_length(), -1, np.int64)
        num = gather_walls(
            walked.on, walked.bits, walked.rising, walked.links, k, marks,
            table, codes, masks, walls, seen,
        )  # fmt: skip
        if num >= 0:
            return walls[:num]
        room *= 2


def _rays(
    walked: Walked, weight: Float64[np.ndarray, "experts dims"]
) -> tuple[Float64[np.ndarray, "rays dims"], Int32[np.ndarray, "vertices edges"]]:
    """Unit vectors of the edges without end, and the number of each."""
    vertex, edge = np.nonzero(walked.links == RAY)
    ray_of = np.full(walked.links.shape, -1, np.int32)
    ray_of[vertex, edge] = np.arange(len(vertex))
    # a vertex has several edges without end: each basis is inverted once
    is_new = np.append(True, vertex[1:] != vertex[:-1])[: len(vertex)]
    experts, basis_of = walked.on[vertex[is_new]].astype(np.int64), np.cumsum(is_new) - 1
    basis = np.concatenate([weight[experts], np.full((*experts.shape, 1), -1.0)], axis=2)
    inverse = np.linalg.inv(basis)
    found = inverse[basis_of, :-1, edge // 2]
    found *= np.where(edge % 2 == 1, 1.0, -1.0)[:, None]
    return found / np.linalg.norm(found, axis=1, keepdims=True), ray_of
