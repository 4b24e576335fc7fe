"""How large cells are, as seen from the origin: the share of all directions in each."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Float64, Int64, Integer

from moegeom.studies.cells.exact.exact_cells import sweep


@dataclass(frozen=True, eq=False)
class SolidAngles:
    """Share of directions of each cell of a central router, in the order of the sorted experts.

    ``standard_error`` is 0 for shares that are not sampled. ``unseen`` bounds the share of any one
    cell that is not listed, at 95 %: 0 where all are.
    """

    expert_set: Int64[np.ndarray, "cells k"]
    share: Float64[np.ndarray, "cells"]
    standard_error: Float64[np.ndarray, "cells"]
    unseen: float


def exact_angles(weight: Float64[np.ndarray, "experts dims"], k: int) -> SolidAngles:
    r"""Shares of the circle (d = 2), or of the two directions of a line (d = 1).

    The ends of arcs are exact rationals x on the tangents :math:`x_2 = \pm 1`; an arc from x to x'
    has the angle :math:`\mathrm{atan2}(x' - x, 1 + x x')`, to a relative error of 1e-14, however
    thin it is. Equal rows: the lower number wins. Shares sum to 1.

    Raises ValueError for other d and for k outside 1..E. Oracle in tests: Monte Carlo.
    """
    experts, dims = weight.shape
    if dims not in (1, 2):
        raise ValueError(f"angles on {dims} dimensions: exact on 1 and 2, sampled on more")
    if not 1 <= k <= experts:
        raise ValueError(f"top_k {k} of {experts} experts")
    angle: defaultdict[tuple[int, ...], float] = defaultdict(float)
    if dims == 1:
        for side in (1.0, -1.0):
            top = np.argsort(-side * weight[:, 0], kind="stable")[:k]
            angle[tuple(sorted(top.tolist()))] += 0.5
    elif k == experts:
        angle[tuple(range(experts))] += 1.0
    else:
        slope = [Fraction(float(value)) for value in weight[:, 0]]
        height = [Fraction(float(value)) for value in weight[:, 1]]
        for side in (1, -1):
            for chosen, start, stop in sweep(slope, [side * value for value in height], k):
                angle[tuple(sorted(chosen))] += _arc(start, stop) / (2.0 * math.pi)
    listed = sorted(angle)
    share = np.array([angle[cell] for cell in listed])
    return SolidAngles(np.array(listed, np.int64), share, np.zeros(len(share)), 0.0)


def _arc(start: Fraction | None, stop: Fraction | None) -> float:
    """The angle under which a piece of a line at distance 1 is seen."""
    if start is None:
        return math.pi if stop is None else math.atan2(1.0, -_float(stop))
    if stop is None:
        return math.atan2(1.0, _float(start))
    across, along = stop - start, 1 + start * stop
    largest = max(across, abs(along))  # fractions of any size become floats of moderate size
    return math.atan2(float(across / largest), float(along / largest))


def _float(value: Fraction) -> float:
    """A float, infinite beyond the largest."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


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
