"""Names of facets, where there is room for them."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int64

from moegeom.document.chart import Label

#: Advance of a digit and of the bar, and the height of digits, in units of the size of type.
_DIGIT, _BAR, _HEIGHT = 0.636, 0.337, 0.73

#: Where on a facet a name is tried, as shares of its length.
_PLACES = (0.5, 0.35, 0.65, 0.22, 0.78)


def facet_names(
    ends: Float64[np.ndarray, "facets 2 2"],
    towards: Float64[np.ndarray, "facets 2"],
    out: Int64[np.ndarray, "facets"],
    into: Int64[np.ndarray, "facets"],
    edges: Float64[np.ndarray, "edges 2 2"],
    free: Float64[np.ndarray, "marks 2"],
    size: float,
    most: int,
) -> list[Label]:
    """At most so many names ``17|42``, longest facets first, that cross no facet, name or mark.

    The bar lies on the facet, each expert on the side where it serves. All lengths are in points of
    the page. ``towards`` points from the side of ``out`` to that of ``into``; a name is turned so
    that it is not upside down. No name crosses the ``edges`` or covers a point of ``free``.
    """
    along = ends[:, 1] - ends[:, 0]
    length = np.hypot(along[:, 0], along[:, 1])
    names: list[Label] = []
    barriers = np.concatenate([ends, edges])
    for facet in np.argsort(-length, kind="stable")[: 8 * most].tolist():
        if len(names) == most or length[facet] < 2 * _HEIGHT * size:
            break
        across = np.array([along[facet, 1], -along[facet, 0]]) / length[facet]
        across = across if across @ towards[facet] >= 0 else -across
        pair = (str(out[facet]), str(into[facet]))
        if across[0] < -1e-9 or (abs(across[0]) <= 1e-9 and across[1] < 0):
            across, pair = -across, pair[::-1]
        first, second = (_DIGIT * size * len(number) for number in pair)
        half = np.array([(first + second + _BAR * size) / 2, _HEIGHT * size / 2]) + 0.25 * size
        is_near = _near(barriers, ends[facet], 2 * float(half.sum()))
        is_near[facet] = False
        near = barriers[is_near]
        for share in _PLACES:
            middle = ends[facet, 0] + share * along[facet] + across * (second - first) / 2
            is_beyond = length[facet] * min(share, 1 - share) < half[1]
            if is_beyond or _meets(near, middle, across, half):
                continue
            if _covers(free, middle, across, half):
                continue
            angle = float(np.degrees(np.arctan2(across[1], across[0])))
            place = (float(middle[0]), float(middle[1]))
            names.append(Label("|".join(pair), place, angle, size))
            barriers = np.concatenate([barriers, _corners(middle, across, half)])
            break
    return names


def _near(
    segments: Float64[np.ndarray, "all 2 2"], facet: Float64[np.ndarray, "2 2"], reach: float
) -> Bool[np.ndarray, "all"]:
    """Segments whose box comes within ``reach`` of that of a facet."""
    low, high = facet.min(0) - reach, facet.max(0) + reach
    one, other = segments[:, 0], segments[:, 1]
    return ((np.maximum(one, other) >= low) & (np.minimum(one, other) <= high)).all(1)


def _inner(
    points: Float64[np.ndarray, "*any 2"],
    middle: Float64[np.ndarray, "2"],
    across: Float64[np.ndarray, "2"],
) -> Float64[np.ndarray, "*any 2"]:
    """Coordinates along and across a text."""
    x, y = points[..., 0] - middle[0], points[..., 1] - middle[1]
    return np.stack([across[0] * x + across[1] * y, across[0] * y - across[1] * x], -1)


def _corners(
    middle: Float64[np.ndarray, "2"],
    across: Float64[np.ndarray, "2"],
    half: Float64[np.ndarray, "2"],
) -> Float64[np.ndarray, "4 2 2"]:
    """The four sides of the box around a text."""
    other = np.array([-across[1], across[0]])
    signs = ((1, 1), (-1, 1), (-1, -1), (1, -1))
    corners = np.array([middle + s * half[0] * across + t * half[1] * other for s, t in signs])
    return np.stack([corners, np.roll(corners, -1, axis=0)], 1)


def _covers(
    points: Float64[np.ndarray, "marks 2"],
    middle: Float64[np.ndarray, "2"],
    across: Float64[np.ndarray, "2"],
    half: Float64[np.ndarray, "2"],
) -> bool:
    return bool((np.abs(_inner(points, middle, across)) <= half).all(-1).any())


def _meets(
    segments: Float64[np.ndarray, "facets 2 2"],
    middle: Float64[np.ndarray, "2"],
    across: Float64[np.ndarray, "2"],
    half: Float64[np.ndarray, "2"],
) -> bool:
    """Whether a segment meets the box: the shares of it within both strips overlap."""
    inner = _inner(segments, middle, across)
    start, step = inner[:, 0], inner[:, 1] - inner[:, 0]
    is_level = step == 0
    safe = np.where(is_level, 1.0, step)
    one, other = (-half - start) / safe, (half - start) / safe
    is_outside: Bool[np.ndarray, "facets"] = (is_level & (np.abs(start) > half)).any(1)
    enter = np.where(is_level, -np.inf, np.minimum(one, other)).max(1)
    leave = np.where(is_level, np.inf, np.maximum(one, other)).min(1)
    return bool((~is_outside & (np.maximum(enter, 0) <= np.minimum(leave, 1))).any())
