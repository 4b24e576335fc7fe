"""What a picture of a slice shows: cells of a plane, pixels, a graph in space, or a circle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64, UInt8

#: Experts of a cell, by rising number.
Coalition = tuple[int, ...]

#: x0, x1, y0, y1 of the part of the plane that is drawn.
Frame = tuple[float, float, float, float]

#: States of a pixel.
CONSTANT, CROSSED, OPEN = range(3)


@dataclass(frozen=True, eq=False)
class SliceCaption:
    """Where a picture comes from, and how much of the tokens' routing it shows.

    ``subspace`` as in "pca:2 of 16384 tokens"; ``variance_share`` is the share of the tokens'
    variance within it, ``own_cell_share`` the share of tokens whose own choice of experts is that
    of the place where they are drawn. What is unknown is None. ``is_certified`` says that every
    cell and wall is proved; ``remark`` is one sentence, or empty.
    """

    model: str
    router: str
    top_k: int
    num_experts: int
    subspace: str
    variance_share: float | None
    own_cell_share: float | None
    num_tokens: int | None
    seed: int | None
    version: str
    is_certified: bool
    remark: str


@dataclass(frozen=True, eq=False)
class TokenMarks:
    """Tokens by their place in a plane.

    ``is_own`` where the token's own coalition, in all dimensions, is the plane's at that place;
    ``distance`` to the nearest wall in all dimensions; ``label`` is the number of the domain,
    ``number`` that of the token in its recording.
    """

    place: Float64[np.ndarray, "tokens 2"]
    is_own: Bool[np.ndarray, "tokens"]
    distance: Float64[np.ndarray, "tokens"] | None = None
    label: Int64[np.ndarray, "tokens"] | None = None
    number: Int64[np.ndarray, "tokens"] | None = None


@dataclass(frozen=True, eq=False)
class PlaneCells:
    """Cells of an affine router in a plane, as polygons.

    ``polygons`` are counter-clockwise and clipped to the frame, one per coalition; one outside the
    frame has no corner. The sum of the k largest logits in a cell is ``gradient`` . x + ``offset``.
    Walls are segments within the frame: ``wall_out`` serves in the first of ``wall_cells`` and
    ``wall_into`` in the second.
    """

    caption: SliceCaption
    frame: Frame
    coalitions: tuple[Coalition, ...]
    polygons: tuple[Float64[np.ndarray, "_ 2"], ...]
    gradient: Float64[np.ndarray, "cells 2"]
    offset: Float64[np.ndarray, "cells"]
    wall_ends: Float64[np.ndarray, "walls 2 2"]
    wall_cells: Int64[np.ndarray, "walls 2"]
    wall_out: Int64[np.ndarray, "walls"]
    wall_into: Int64[np.ndarray, "walls"]
    tokens: TokenMarks | None = None


@dataclass(frozen=True, eq=False)
class RasterCells:
    """Cells of any router in a plane, by pixels; row 0 is the lowest, at y0.

    ``label`` is the place in ``coalitions``, below 0 where none is known. ``state`` is 0 where one
    coalition is proved for the whole pixel, 1 where a wall crosses it, 2 where nothing is proved.
    """

    caption: SliceCaption
    frame: Frame
    label: Int32[np.ndarray, "height width"]
    state: UInt8[np.ndarray, "height width"]
    coalitions: tuple[Coalition, ...]
    tokens: TokenMarks | None = None


@dataclass(frozen=True, eq=False)
class SpaceCells:
    """Cells of a slice of three dimensions, by a point inside each, and which of them touch.

    ``out`` serves in the first cell of each wall and ``into`` in the second.
    """

    caption: SliceCaption
    place: Float64[np.ndarray, "cells 3"]
    coalitions: tuple[Coalition, ...]
    walls: Int64[np.ndarray, "walls 2"]
    out: Int64[np.ndarray, "walls"]
    into: Int64[np.ndarray, "walls"]
    tokens_inside: Int64[np.ndarray, "cells"] | None = None


@dataclass(frozen=True, eq=False)
class CircleCells:
    """Cells along a circle: one arc per coalition in order, from ``start`` to ``stop`` in radians.

    An arc that passes the angle 0 stops beyond 2 pi.
    """

    caption: SliceCaption
    coalitions: tuple[Coalition, ...]
    start: Float64[np.ndarray, "arcs"]
    stop: Float64[np.ndarray, "arcs"]
    token_angle: Float64[np.ndarray, "tokens"] | None = None
    is_own: Bool[np.ndarray, "tokens"] | None = None


SlicePicture = PlaneCells | RasterCells | SpaceCells | CircleCells


def coalition_text(coalition: Coalition) -> str:
    """``3 17 42``."""
    return " ".join(map(str, coalition))
