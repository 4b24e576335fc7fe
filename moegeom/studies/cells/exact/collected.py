"""From the vertices of the order-k diagram to its cells and facets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from jaxtyping import Bool, Float64, Int16, Int64, UInt8


@dataclass(frozen=True, eq=False)
class CollectedCells:
    """Cells in the order of their sorted experts, and the facets between them.

    ``witness`` is the mean of the vertices of each plus the sum of its rays, as far as float64
    goes; ``is_proved`` where a vertex without a tie belongs to the cell, which then is open and not
    empty. A facet is a pair of cells, ``out`` the expert that only the first has, ``into`` the one
    that only the second has, out < into.
    """

    expert_set: Int16[np.ndarray, "cells k"]
    witness: Float64[np.ndarray, "cells dims"]
    is_bounded: Bool[np.ndarray, "cells"]
    is_proved: Bool[np.ndarray, "cells"]
    facets: Int64[np.ndarray, "facets 2"]
    out: Int16[np.ndarray, "facets"]
    into: Int16[np.ndarray, "facets"]


def collected(
    on: Int16[np.ndarray, "vertices on"],
    above: Bool[np.ndarray, "vertices experts"],
    is_proved: Bool[np.ndarray, "vertices"],
    rays: Bool[np.ndarray, "vertices edges"],
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    k: int,
) -> CollectedCells:
    """Cells and facets that meet at the vertices of a whole walk.

    At a vertex with a experts above and d + 1 on the level every choice of k - a of those is a
    cell, and two choices that differ in one expert share a facet. ``rays`` marks edges without end,
    at 2 c where ``on[c]`` goes down and 2 c + 1 where it goes up. Source: docs/theory.md G1.
    """
    point, direction = _places(on, weight, bias)
    size, d = on.shape[1], weight.shape[1]
    blocks = []
    for number in range(1, size):
        rows = np.flatnonzero(above.sum(axis=1) == k - number)
        if len(rows):
            blocks.append((rows, list(combinations(range(size), number))))
    masks = [_masks(on, above, rows, choices) for rows, choices in blocks]
    flat = np.concatenate([mask.reshape(-1, mask.shape[2]) for mask in masks])
    packed, number_of = _numbered(np.packbits(flat, axis=1))
    count = len(packed)
    expert_set = np.nonzero(np.unpackbits(packed, axis=1, count=len(bias)))[1].reshape(count, k)
    total, vertices, proved = np.zeros((count, d)), np.zeros(count), np.zeros(count, bool)
    open_ends, spread = np.zeros(count, bool), np.zeros((count, d))
    facets, start = [], 0
    for rows, choices in blocks:
        stop = start + len(rows) * len(choices)
        cell = number_of[start:stop].reshape(len(rows), len(choices))
        start = stop
        for column, choice in enumerate(choices):
            np.add.at(total, cell[:, column], point[rows])
            np.add.at(vertices, cell[:, column], 1.0)
            proved[cell[is_proved[rows], column]] = True
            for c in range(size):
                # the expert that leaves goes up in the cells that have it, and down in the others
                edge = 2 * c + (c in choice)
                ends = np.flatnonzero(rays[rows, edge])
                sign = 1.0 if c in choice else -1.0
                np.add.at(spread, cell[ends, column], sign * direction[rows[ends], c])
                open_ends[cell[ends, column]] = True
        facets += _facets(on, rows, choices, cell)
    found = np.unique(np.concatenate(facets), axis=0) if facets else np.empty((0, 4), np.int64)
    order = np.lexsort(expert_set.T[::-1])
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    return CollectedCells(
        expert_set=expert_set[order].astype(np.int16),
        witness=(total / vertices[:, None] + spread)[order],
        is_bounded=~open_ends[order],
        is_proved=proved[order],
        facets=place[found[:, :2]],
        out=found[:, 2].astype(np.int16),
        into=found[:, 3].astype(np.int16),
    )


def _places(
    on: Int16[np.ndarray, "vertices on"],
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
) -> tuple[Float64[np.ndarray, "vertices dims"], Float64[np.ndarray, "vertices on dims"]]:
    """Where each vertex lies, and the unit direction in which each of its experts goes up."""
    experts = on.astype(np.int64)
    basis = np.concatenate([weight[experts], np.full((*on.shape, 1), -1.0)], axis=2)
    inverse = np.linalg.inv(basis)
    point = -np.einsum("vdc,vc->vd", inverse, bias[experts])[:, :-1]
    direction = np.swapaxes(inverse[:, :-1, :], 1, 2)
    length = np.sqrt((direction**2).sum(axis=2, keepdims=True))
    return point, direction / np.maximum(length, np.finfo(np.float64).tiny)


def _masks(
    on: Int16[np.ndarray, "vertices on"],
    above: Bool[np.ndarray, "vertices experts"],
    rows: Int64[np.ndarray, "rows"],
    choices: list[tuple[int, ...]],
) -> Bool[np.ndarray, "rows choices experts"]:
    """The expert set of each choice at each vertex, as a mask."""
    found = np.repeat(above[rows][:, None, :], len(choices), axis=1)
    for column, choice in enumerate(choices):
        for c in choice:
            found[np.arange(len(rows)), column, on[rows, c]] = True
    return found


def _numbered(
    packed: UInt8[np.ndarray, "rows bytes"],
) -> tuple[UInt8[np.ndarray, "cells bytes"], Int64[np.ndarray, "rows"]]:
    """Distinct rows, and which of them each row is."""
    keys = np.ascontiguousarray(packed).view(np.dtype((np.void, packed.shape[1])))[:, 0]
    _, first, number_of = np.unique(keys, return_index=True, return_inverse=True)
    return packed[first], number_of.astype(np.int64)


def _facets(
    on: Int16[np.ndarray, "vertices on"],
    rows: Int64[np.ndarray, "rows"],
    choices: list[tuple[int, ...]],
    cell: Int64[np.ndarray, "rows choices"],
) -> list[Int64[np.ndarray, "rows 4"]]:
    """Pairs of cells at the vertices that differ in one expert: both cells, out and into."""
    found = []
    for (first, one), (second, other) in combinations(enumerate(choices), 2):
        left, right = set(one) - set(other), set(other) - set(one)
        if len(left) != 1:
            continue
        a, b = on[rows, left.pop()].astype(np.int64), on[rows, right.pop()].astype(np.int64)
        is_first = a < b  # the cell with the lower number comes first
        found.append(
            np.stack(
                [
                    np.where(is_first, cell[:, first], cell[:, second]),
                    np.where(is_first, cell[:, second], cell[:, first]),
                    np.minimum(a, b),
                    np.maximum(a, b),
                ],
                axis=1,
            )
        )
    return found
