"""Cells of a slice as a picture shows them, and the options of a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moegeom.core.errors import UsageError
from moegeom.core.shapes import Bool, Float64, Int32, Int64, Integer, UInt8

#: Widths of one and of two columns in most journals, in millimetres.
ONE_COLUMN, TWO_COLUMNS = 89.0, 183.0

#: Narrowest and widest page, in millimetres.
_WIDTHS = (60.0, 600.0)


@dataclass(frozen=True)
class PictureOptions:
    """``width`` is in millimetres, ``band`` half the width of the shaded strip along facets, in
    units of the plane; ``expert`` is the one of the view "expert"; ``dpi`` counts where pixels do.

    Raises UsageError for a value out of range.
    """

    view: str = "cells"
    expert: int | None = None
    band: float | None = None
    width: float = ONE_COLUMN
    with_caption: bool = False
    dpi: int = 300

    def __post_init__(self) -> None:
        if not _WIDTHS[0] <= self.width <= _WIDTHS[1]:
            raise UsageError(
                f"A picture of {self.width:g} mm was asked for, {_WIDTHS[0]:g} to {_WIDTHS[1]:g} "
                "mm are possible.",
                f"One column is {ONE_COLUMN:g} mm, two are {TWO_COLUMNS:g} mm.",
            )
        if self.band is not None and not (math.isfinite(self.band) and self.band >= 0):
            raise UsageError(
                f"Band {self.band} of a picture: half a width, 0 or more, was expected.",
                "It is in units of the plane, as on its axes.",
            )
        if not 30 <= self.dpi <= 2400:
            raise UsageError(
                f"A picture of {self.dpi} dots per inch was asked for, 30 to 2400 are possible.",
                "Journals want 300 for photographs, 600 to 1200 for lines; SVG and PDF need none.",
            )

    def expert_of(self, num_experts: int) -> int:
        """The expert of the view "expert". Raises UsageError where it is none of these."""
        if self.expert is None or not 0 <= self.expert < num_experts:
            which = "no expert" if self.expert is None else f"expert {self.expert}"
            raise UsageError(
                f"The view 'expert' was asked for with {which} of {num_experts}.",
                f"Name one: expert = 0 to {num_experts - 1}.",
            )
        return self.expert


#: Experts of a cell, by rising number.
ExpertSet = tuple[int, ...]

#: x0, x1, y0, y1 of the part of the plane that is drawn.
Frame = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class SliceCaption:
    """Where a picture comes from, and how much of the tokens' routing it shows.

    ``subspace`` as in "pca:2 of 16384 tokens"; ``variance_share`` is the share of the tokens'
    variance within it, ``num_own`` how many tokens choose what the slice chooses at the place where
    they are drawn. What is unknown is None. ``is_certified`` says that every cell and facet is
    proved; ``remark`` is one sentence, or empty.
    """

    model: str
    router: str
    top_k: int
    num_experts: int
    subspace: str
    variance_share: float | None
    num_own: int | None
    num_tokens: int | None
    seed: int | None
    version: str
    is_certified: bool
    remark: str


@dataclass(frozen=True, eq=False)
class TokenMarks:
    """Tokens by their place in a plane.

    ``is_own`` where the token's own expert set, in all dimensions, is the plane's at that place;
    ``distance`` to the nearest facet in all dimensions; ``number`` is that of the token in its
    recording.
    """

    place: Float64[np.ndarray, "tokens 2"]
    is_own: Bool[np.ndarray, "tokens"]
    distance: Float64[np.ndarray, "tokens"] | None = None
    number: Int64[np.ndarray, "tokens"] | None = None


@dataclass(frozen=True, eq=False)
class PlaneCells:
    """Cells of an affine router in a plane, as polygons.

    ``polygons`` are counter-clockwise and clipped to the frame, one per expert set; one outside the
    frame has no corner. The sum of the k largest logits in a cell is ``gradient`` . x + ``offset``.
    Facets are segments within the frame: ``facet_out`` serves in the first of ``facet_cells`` and
    ``facet_into`` in the second.
    """

    caption: SliceCaption
    frame: Frame
    expert_sets: tuple[ExpertSet, ...]
    polygons: tuple[Float64[np.ndarray, "_ 2"], ...]
    gradient: Float64[np.ndarray, "cells 2"]
    offset: Float64[np.ndarray, "cells"]
    facet_ends: Float64[np.ndarray, "facets 2 2"]
    facet_cells: Int64[np.ndarray, "facets 2"]
    facet_out: Integer[np.ndarray, "facets"]
    facet_into: Integer[np.ndarray, "facets"]
    tokens: TokenMarks | None = None


@dataclass(frozen=True, eq=False)
class RasterCells:
    """Cells of any router in a plane, by pixels; row 0 is the lowest, at y0.

    ``label`` is the place in ``expert_sets``, below 0 where none is known; ``state`` that of
    :class:`~moegeom.routing_cells.plane.raster_frame.PixelState`.
    """

    caption: SliceCaption
    frame: Frame
    label: Int32[np.ndarray, "height width"]
    state: UInt8[np.ndarray, "height width"]
    expert_sets: tuple[ExpertSet, ...]
    tokens: TokenMarks | None = None


@dataclass(frozen=True, eq=False)
class SpaceCells:
    """Cells of a slice of three dimensions, by a point inside each, and which of them touch.

    ``out`` serves in the first cell of each facet and ``into`` in the second.
    """

    caption: SliceCaption
    place: Float64[np.ndarray, "cells 3"]
    expert_sets: tuple[ExpertSet, ...]
    facets: Int64[np.ndarray, "facets 2"]
    out: Integer[np.ndarray, "facets"]
    into: Integer[np.ndarray, "facets"]
    tokens_inside: Int64[np.ndarray, "cells"] | None = None


@dataclass(frozen=True, eq=False)
class CircleCells:
    """Cells along a circle: one arc per expert set in order, from ``start`` to ``stop`` in radians.

    An arc that passes the angle 0 stops beyond 2 pi.
    """

    caption: SliceCaption
    expert_sets: tuple[ExpertSet, ...]
    start: Float64[np.ndarray, "arcs"]
    stop: Float64[np.ndarray, "arcs"]
    token_angle: Float64[np.ndarray, "tokens"] | None = None
    is_own: Bool[np.ndarray, "tokens"] | None = None


SlicePicture = PlaneCells | RasterCells | SpaceCells | CircleCells


def expert_set_text(expert_set: ExpertSet) -> str:
    """``3 17 42``."""
    return " ".join(map(str, expert_set))
