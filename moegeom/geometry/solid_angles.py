"""How large cells are, as seen from the origin: the share of all directions in each."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64, Integer


@dataclass(frozen=True, eq=False)
class SolidAngles:
    """Share of directions of each cell of a central router, in the order of the sorted experts.

    ``unseen`` bounds the share of any one cell that is not listed, at 95 %.
    """

    expert_set: Int64[np.ndarray, "cells k"]
    share: Float64[np.ndarray, "cells"]
    standard_error: Float64[np.ndarray, "cells"]
    unseen: float


def sampled_angles(
    weight: Float64[np.ndarray, "experts dims"],
    k: int,
    num_directions: int,
    seed: int,
    batch: int = 16384,
) -> SolidAngles:
    r"""Shares by Monte Carlo: Gaussian directions, counted by their top-k set.

    Standard error :math:`\sqrt{s (1 - s) / n}`; a cell that was not seen has a share below
    :math:`1 - 0.05^{1/n}` at 95 %. Equal rows tie exactly, and the lower number wins. Directions
    depend on the seed and the number of columns alone, not on the batch. Raises ValueError for k
    outside 1..E and without directions. Oracle in tests: the exact arcs, and symmetry.
    """
    experts, dims = weight.shape
    if not 1 <= k <= experts or num_directions < 1:
        raise ValueError(f"top_k {k} of {experts} experts, {num_directions} directions")
    generator = np.random.default_rng(seed)
    rows, same = np.unique(weight, axis=0, return_inverse=True)
    seen: Counter[bytes] = Counter()
    left = num_directions
    while left:
        size = min(batch, left)
        logits = (generator.standard_normal((size, dims)) @ rows.T)[:, same.reshape(-1)]
        top = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :k], axis=1)
        for cell, count in zip(*np.unique(top, axis=0, return_counts=True), strict=True):
            seen[cell.astype(np.int64).tobytes()] += int(count)
        left -= size
    expert_set = np.array([np.frombuffer(cell, np.int64) for cell in seen])
    order = np.lexsort(expert_set.T[::-1])
    share = np.array(list(seen.values()))[order] / num_directions
    error = np.sqrt(share * (1.0 - share) / num_directions)
    unseen = -math.expm1(math.log(0.05) / num_directions)
    return SolidAngles(expert_set[order], share, error, unseen)


def shares_of(
    angles: SolidAngles, expert_set: Integer[np.ndarray, "cells k"]
) -> Float64[np.ndarray, "cells"]:
    """The share of each of the given cells, 0 for those that are not listed; rows are sorted."""
    listed = map(tuple, angles.expert_set.tolist())
    known = dict(zip(listed, angles.share.tolist(), strict=True))
    return np.array([known.get(tuple(row), 0.0) for row in expert_set.tolist()])
