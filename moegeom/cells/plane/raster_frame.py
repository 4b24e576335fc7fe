"""The frame of a picture of choices, and what is said of its pixels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from jaxtyping import Float64, Int32, Int64, UInt8

from moegeom.cells.plane.raster_enclosure import Rectangles

#: Corners and halves in units of pixels are off by this share of the largest coordinate.
_EDGE = 2.0**-49
#: Larger pictures are refused.
MOST_PIXELS = 1 << 26


class PixelState(IntEnum):
    """What is proved of a closed pixel.

    ``CONSTANT``: one set on all of it. ``CROSSED``: two points of it whose sets differ, both
    proved. ``OPEN``: neither, down to the last subdivision.
    """

    OPEN = 0
    CONSTANT = 1
    CROSSED = 2


@dataclass(frozen=True)
class Frame:
    """The part of the plane that is shown, and its pixels; row 0 of a picture is at ``y0``."""

    x0: float
    x1: float
    y0: float
    y1: float
    width: int
    height: int

    @property
    def padding(self) -> Float64[np.ndarray, "2"]:
        """How far a computed edge may be from the true one."""
        return _EDGE * np.array([abs(self.x0) + abs(self.x1), abs(self.y0) + abs(self.y1)])

    def rectangles(self, bounds: Int64[np.ndarray, "n 4"], parts: int) -> Rectangles:
        """(left, right, bottom, top) in parts of a pixel to rectangles that cover the true ones."""
        start = np.array([self.x0, self.y0])
        side = np.array([self.x1 - self.x0, self.y1 - self.y0])
        share = side / (np.array([self.width, self.height], dtype=np.float64) * parts)
        low, high = start + bounds[:, 0::2] * share, start + bounds[:, 1::2] * share
        return Rectangles(0.5 * (low + high), 0.5 * (high - low) + self.padding)


@dataclass(frozen=True, eq=False)
class Raster:
    """Choices on a frame: row r is the r-th from ``y0``, column c the c-th from ``x0``.

    ``label`` is an index into ``coalitions``: for a constant pixel the set that is proved, for
    others what the rule chooses at its centre in float64 (ties: the lower index). ``state`` is that
    of :class:`PixelState`. ``coalitions`` has in ascending order what labels need, and what was
    proved at some point of the frame.
    """

    label: Int32[np.ndarray, "height width"]
    state: UInt8[np.ndarray, "height width"]
    coalitions: tuple[tuple[int, ...], ...]

    def count(self, state: PixelState) -> int:
        """Number of pixels of a state."""
        return int(np.count_nonzero(self.state == state))

    def share(self, state: PixelState) -> float:
        """Share of the area of the frame."""
        return self.count(state) / self.state.size


def check_frame(frame: Frame, depth: int) -> None:
    """Raises ValueError for a frame that is empty, too large, or too fine for float64."""
    sides = np.array([frame.x1 - frame.x0, frame.y1 - frame.y0])
    pixels = np.array([frame.width, frame.height])
    if not np.isfinite(sides).all() or sides.min() <= 0.0 or pixels.min() < 1:
        raise ValueError(f"empty frame {frame}")
    if frame.width * frame.height > MOST_PIXELS:
        raise ValueError(f"{frame.width} x {frame.height} pixels, at most {MOST_PIXELS}")
    # a sample is inside its pixel by more than what rounding moves it
    if not 0 <= depth <= 12 or np.any(sides / pixels < frame.padding * 2.0 ** (10 + depth)):
        raise ValueError(f"pixels of {frame} in {depth} halvings are too small for float64")
