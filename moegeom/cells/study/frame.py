"""The part of a plane that is looked at."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from moegeom.cells.study.request import CellsRequest
from moegeom.cells.study.slices import AskedSlice
from moegeom.cells.study.tokens import TokenSample

Frame = tuple[float, float, float, float]

#: Shares of the tokens that are left out at either end of an axis, and the margin around the rest.
_TAIL, _MARGIN = 0.002, 0.08


def frame_of(
    points: Float64[np.ndarray, "tokens 2"] | None,
    asked: AskedSlice,
    sample: TokenSample | None,
    request: CellsRequest,
    reach: float,
) -> Frame:
    """x0, x1, y0, y1: what was asked for, or room for the tokens; a square of ``reach`` without.

    Of a plane through three tokens those three are shown, whatever lies around them.
    """
    if request.frame is not None:
        half = request.frame
        return -half, half, -half, half
    if points is None or not len(points):
        return -reach, reach, -reach, reach
    if asked.at and sample is not None:
        points = points[sample.rows_of(asked.at, "--subspace")]
        low, high = points.min(axis=0), points.max(axis=0)
        margin = 0.5 * float((high - low).max())
    else:
        low, high = np.quantile(points, [_TAIL, 1.0 - _TAIL], axis=0)
        margin = _MARGIN * float((high - low).max())
    margin = margin or reach  # all tokens at one place
    (x0, y0), (x1, y1) = (low - margin).tolist(), (high + margin).tolist()
    return x0, x1, y0, y1
