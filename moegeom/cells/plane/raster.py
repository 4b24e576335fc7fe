"""A picture of the choices on a plane, in which every pixel carries its proof or says it has none.

Rectangles are halved, all undecided ones of a level at once, until one set is proved for each; at
the size of a pixel points with different choices prove the opposite.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float, Int32, Int64, UInt8

from moegeom.cells.plane.raster_choice import certain_choice
from moegeom.cells.plane.raster_enclosure import Rectangles
from moegeom.cells.plane.raster_frame import Frame, PixelState, Raster, check_frame
from moegeom.cells.plane.raster_slice import PlaneRouter, plane_router
from moegeom.cells.plane.score_ranges import score_ranges
from moegeom.core.router import Projection, Rule

#: Samples of a pixel: its corners, a little to the inside, opposite ones first, and its centre.
_SAMPLES = np.array([[-1, -1], [1, 1], [-1, 1], [1, -1], [0, 0]]) * (1.0 - 2.0**-6)
#: Parts of open pixels that are looked at together; pixels stay open where that were more.
MOST_PARTS = 1 << 20
_FAR = np.iinfo(np.int32).max


def raster(
    rule: Rule,
    weight: Float[np.ndarray, "experts hidden"],
    logit_bias: Float[np.ndarray, "experts"] | None,
    selection_bias: Float[np.ndarray, "experts"] | None,
    centre: Float[np.ndarray, "hidden"],
    basis: Float[np.ndarray, "hidden 2"],
    frame: tuple[float, float, float, float],
    size: tuple[int, int],
    projection: Projection | None = None,
    depth: int = 3,
) -> Raster:
    r"""Which set a router of any rule chooses at :math:`y = c + B u`, for u in a frame.

    ``frame`` is (x0, x1, y0, y1) in coordinates u, ``size`` (width, height) in pixels; pixels are
    halved up to ``depth`` times. What is proved holds for :math:`(W B) u + (W c + b)` with products
    rounded to float64 once, both for the exact rule and for its evaluation in float64. A tie that
    does not go away is never proved. Time grows with the length of the walls in pixels.

    Raises ValueError where the numbers are not finite, the frame is empty, or its pixels are too
    small for float64. Source: :mod:`moegeom.cells.plane.raster_enclosure`. Oracle in tests: the
    rule at random points, and exact arithmetic for affine rules.
    """
    router = plane_router(rule, weight, logit_bias, selection_bias, centre, basis, projection)
    return plane_raster(router, Frame(*frame, *size), depth)


def plane_raster(router: PlaneRouter, frame: Frame, depth: int = 3) -> Raster:
    """What :func:`raster` gives, of a router that is given on its plane."""
    check_frame(frame, depth)
    found = Coalitions()
    label = np.full((frame.height, frame.width), -1, dtype=np.int32)
    state = np.full(label.shape, PixelState.OPEN, dtype=np.uint8)
    bounds = np.array([[0, frame.width, 0, frame.height]])
    while len(bounds):
        is_proved, number = proved_sets(router, frame.rectangles(bounds, 1), found)
        _fill(label, bounds[is_proved], number[is_proved])
        bounds = bounds[~is_proved]
        is_pixel = (bounds[:, 1] - bounds[:, 0] == 1) & (bounds[:, 3] - bounds[:, 2] == 1)
        bounds = _split(bounds[~is_pixel])
    state[label >= 0] = PixelState.CONSTANT
    rows, columns = np.nonzero(label < 0)
    pixels = np.stack([columns, columns + 1, rows, rows + 1], axis=1)
    if len(pixels):
        label[rows, columns], state[rows, columns] = _looked_into(
            router, frame, pixels, depth, found
        )
    return _in_order(label, state, found)


def _fill(
    label: Int32[np.ndarray, "height width"],
    bounds: Int64[np.ndarray, "n 4"],
    number: Int32[np.ndarray, "n"],
) -> None:
    """All pixels of each rectangle get its number; rectangles of one shape at once."""
    shapes = np.stack([bounds[:, 1] - bounds[:, 0], bounds[:, 3] - bounds[:, 2]], axis=1)
    for wide, high in np.unique(shapes, axis=0):
        same = np.flatnonzero((shapes == (wide, high)).all(axis=1))
        columns = bounds[same, 0][:, None, None] + np.arange(wide)[None, None, :]
        rows = bounds[same, 2][:, None, None] + np.arange(high)[None, :, None]
        label[rows, columns] = number[same][:, None, None]


def _split(bounds: Int64[np.ndarray, "n 4"]) -> Int64[np.ndarray, "m 4"]:
    """Halves of each side that is longer than 1."""
    for low, high in ((0, 1), (2, 3)):
        is_long = bounds[:, high] - bounds[:, low] > 1
        middle = (bounds[:, low] + bounds[:, high]) // 2
        first, second = bounds.copy(), bounds[is_long].copy()
        first[is_long, high] = second[:, low] = middle[is_long]
        bounds = np.concatenate([first, second])
    return bounds


def _looked_into(
    router: PlaneRouter,
    frame: Frame,
    pixels: Int64[np.ndarray, "n 4"],
    depth: int,
    found: Coalitions,
) -> tuple[Int32[np.ndarray, "n"], UInt8[np.ndarray, "n"]]:
    """Labels and states of pixels that were not proved as a whole.

    Of each pixel the lowest and the highest number of a proved set is kept: points, and parts that
    are proved as a whole. It is crossed where they differ, constant where no part is left. Where
    nothing is proved at any of five points a tie stays, which halving would not end.
    """
    lowest = np.full(len(pixels), _FAR, dtype=np.int32)
    highest = np.full(len(pixels), -1, dtype=np.int32)
    is_open = np.zeros(len(pixels), dtype=bool)
    owner = np.arange(len(pixels))
    bounds, parts = pixels, 1
    for level in range(depth + 1):
        if level and 4 * len(bounds) > MOST_PARTS:
            break
        if level:
            bounds, parts = _split(2 * bounds), 2 * parts
            owner = np.tile(owner, 4)
            is_proved, number = proved_sets(router, frame.rectangles(bounds, parts), found)
            _note(lowest, highest, owner[is_proved], number[is_proved])
            bounds, owner = bounds[~is_proved], owner[~is_proved]
        bounds, owner = _without(bounds, owner, lowest < highest)
        for sample in _SAMPLES:
            rectangles = frame.rectangles(bounds, parts)
            points = rectangles.centre + sample * (rectangles.half - frame.padding)
            is_proved, number = proved_sets(
                router, Rectangles(points, np.zeros_like(points)), found
            )
            _note(lowest, highest, owner[is_proved], number[is_proved])
            bounds, owner = _without(bounds, owner, lowest < highest)
        is_open[owner[highest[owner] < 0]] = True
        bounds, owner = _without(bounds, owner, is_open)
    is_open[owner] = True
    state = np.where(is_open, PixelState.OPEN, PixelState.CONSTANT).astype(np.uint8)
    state[lowest < highest] = PixelState.CROSSED
    label = lowest
    others = np.flatnonzero(state != PixelState.CONSTANT)
    centre = frame.rectangles(pixels[others], 1).centre
    for some in chunks(len(others), router):
        label[others[some]] = found.numbered(router.choice(centre[some]))
    return label, state


def _note(lowest: np.ndarray, highest: np.ndarray, owner: np.ndarray, number: np.ndarray) -> None:
    np.minimum.at(lowest, owner, number)
    np.maximum.at(highest, owner, number)


def _without(
    bounds: np.ndarray, owner: np.ndarray, is_done: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What belongs to pixels that are not done."""
    left = ~is_done[owner]
    return bounds[left], owner[left]


def _in_order(label: np.ndarray, state: np.ndarray, found: Coalitions) -> Raster:
    coalitions = found.listed()
    order = sorted(range(len(coalitions)), key=coalitions.__getitem__)
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return Raster(place[label], state, tuple(coalitions[i] for i in order))


#: Numbers of one array of a chunk: all arrays of a chunk together stay within some 50 MB.
_CHUNK = 1 << 15


class Coalitions:
    """Numbers of chosen sets, in the order in which they are first met."""

    def __init__(self) -> None:
        self._number: dict[bytes, int] = {}
        self._size = 0

    def numbered(self, chosen: np.ndarray) -> Int32[np.ndarray, "n"]:
        """Number of each row, new ones included."""
        rows = np.ascontiguousarray(chosen, dtype=np.int32)
        self._size = rows.shape[1]
        number = self._number
        keys = rows.view(f"V{rows.itemsize * self._size}").ravel().tolist()
        return np.array([number.setdefault(key, len(number)) for key in keys], dtype=np.int32)

    def listed(self) -> list[tuple[int, ...]]:
        """All sets so far, by number."""
        return [tuple(np.frombuffer(key, dtype=np.int32).tolist()) for key in self._number]


def proved_sets(
    router: PlaneRouter, rectangles: Rectangles, found: Coalitions
) -> tuple[Bool[np.ndarray, "n"], Int32[np.ndarray, "n"]]:
    """Whether one set is chosen on each rectangle, and its number (-1 where it is not proved)."""
    is_proved = np.zeros(len(rectangles.centre), dtype=bool)
    number = np.full(len(is_proved), -1, dtype=np.int32)
    for some in chunks(len(is_proved), router):
        part = Rectangles(rectangles.centre[some], rectangles.half[some])
        is_proved[some], chosen = certain_choice(score_ranges(router, part), router.rule)
        hits = np.flatnonzero(is_proved[some])
        number[some][hits] = found.numbered(chosen[hits])
    return is_proved, number


def chunks(total: int, router: PlaneRouter) -> Iterator[slice]:
    """Slices of so many rectangles that their arrays stay within a cache."""
    experts = len(router.offset)
    groups = 0 if router.rule.groups is None else router.rule.groups.num_groups
    pairs = max(router.rule.top_k * min(experts, 16), 6 * groups * groups)
    step = max(_CHUNK // max(experts, pairs), 1)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))
