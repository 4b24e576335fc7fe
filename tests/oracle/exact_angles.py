"""Shares of directions of cells on a plane, exactly: what samples of them are compared with."""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

import numpy as np
from jaxtyping import Float64

from moegeom.geometry.solid_angles import SolidAngles
from moegeom.studies.cells.exact.exact_cells import sweep


def exact_angles(weight: Float64[np.ndarray, "experts dims"], k: int) -> SolidAngles:
    r"""Shares of the circle (d = 2), or of the two directions of a line (d = 1).

    The ends of arcs are exact rationals x on the tangents :math:`x_2 = \pm 1`; an arc from x to x'
    has the angle :math:`\mathrm{atan2}(x' - x, 1 + x x')`, to a relative error of 1e-14, however
    thin it is. Equal rows: the lower number wins. Shares sum to 1.

    Raises ValueError for other d and for k outside 1..E.
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
