"""The options of ``research cells``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from moegeom.core.errors import UsageError
from moegeom.core.option import argument, option
from moegeom.engine.parameters import option_of
from moegeom.engine.request import CHECKPOINT, StudyRequest, WorkerOptions


@dataclass(frozen=True)
class CellsRequest(StudyRequest, WorkerOptions):
    """What was asked for, by the command line or, for some fields, from Python alone."""

    PYTHON_ONLY: ClassVar[tuple[str, ...]] = (
        *(*StudyRequest.PYTHON_ONLY, "random_routers"),
        *("frame", "pixels", "width", "dpi"),
    )

    checkpoint: str = argument(f"Checkpoint: {CHECKPOINT}; or --weights with --top-k.", default="")
    _: dataclasses.KW_ONLY
    subspace: str | None = option(
        "full, pca:D, random:D, plane:A,B,C or circle:A,B (tokens), or an npz file with centre and "
        "basis. [default: full; with --plot and tokens pca:2]"
    )
    weights: Path | None = option("A bare matrix instead: npz with weight and bias.")
    expert_set: tuple[int, ...] | None = option("Is this set a cell? Experts, such as 3,17,40.")
    certify: bool = option("Check every witness or proof again in integers.", False)
    tie_broken: bool = option("Of equal experts the lower number wins.", False)
    random_routers: int = option(
        "Count the cells of so many random routers with the same row norms too.", 0
    )
    vertices: int = option("Vertices to walk at most.", 10**7, min=1)
    out: Path | None = option("Folder for cells.parquet and facets.parquet.")
    plot: Path | None = option("Picture: .svg, .pdf or .png.")
    view: str = option("cells or expert:E.", "cells")
    frame: float | None = option(
        "Half the side of what the picture shows; without it there is room for the tokens."
    )
    pixels: int = option("Pixels a side where facets are curved.", 512)
    caption: bool = option("Write the caption below the picture.", False)
    width: float = option("Width of the picture in millimetres (one column is 89).", 89.0)
    dpi: int = option("Dots per inch where they count.", 300)

    @property
    def parsed_view(self) -> tuple[str, int | None]:
        """The view and its expert, of ``expert:E`` too; others stay as they are, to be refused.

        Raises UsageError for an expert that is no number.
        """
        view, colon, expert = self.view.partition(":")
        if not colon:
            return view, None
        if not expert.isdecimal():
            raise UsageError(f"--view {self.view}: expected a number of an expert, as in {view}:3.")
        return view, int(expert)


def check_request(request: CellsRequest) -> None:
    """Raises UsageError for what cannot be meant, before anything is read.

    Parameters that the command line has are named as they are typed there.
    """
    if (request.weights is None) == (not request.checkpoint):
        raise UsageError("expected a checkpoint, or --weights FILE.npz, and not both.")
    if request.weights is not None and request.requested_family.top_k is None:
        raise UsageError("--weights needs --top-k K: a matrix does not say how many are chosen.")
    if request.weights is not None and request.tokens is not None:
        raise UsageError("--tokens goes with a checkpoint, not with --weights.")
    if request.frame is not None and not 0.0 < request.frame < np.inf:
        raise UsageError(f"frame {request.frame:g}: expected a positive number.")
    for name, (least, most, words) in _RANGES.items():
        if not least <= getattr(request, name) <= most:
            raise UsageError(f"{name} {getattr(request, name)}: expected {words}.")
    _refuse_alone(request)
    _check_plot(request)
    if request.certify and request.expert_set is None and request.out is None:
        raise UsageError("--certify goes with --expert-set or --out: what it checks is written.")


#: The least and the largest of what such a field may be, and that in words.
_RANGES = {
    "random_routers": (0, 1000, "0 to 1,000 routers"),
    "pixels": (8, 4096, "8 to 4,096 pixels a side"),
}


def _typed(name: str) -> str:
    """A parameter as the one who gave it wrote it."""
    return name if name in CellsRequest.PYTHON_ONLY else option_of(name)


#: Options that mean nothing without another one, and what they are when they are not given.
_GOES_WITH: dict[str, tuple[str, object]] = {
    "view": ("plot", "cells"),
    "frame": ("plot", None),
    "caption": ("plot", False),
}

#: Options that a question about one set of experts has no use for.
_NOT_WITH_EXPERT_SET: dict[str, object] = {
    "plot": None,
    "out": None,
    "tie_broken": False,
    "random_routers": 0,
}


def _refuse_alone(request: CellsRequest) -> None:
    """Raises UsageError for options that would be passed over."""
    for name, (needed, default) in _GOES_WITH.items():
        if getattr(request, name) != default and getattr(request, needed) is None:
            raise UsageError(f"{_typed(name)} goes with {_typed(needed)}.")
    if request.expert_set is not None:
        for name, default in _NOT_WITH_EXPERT_SET.items():
            if getattr(request, name) != default:
                raise UsageError(f"--expert-set goes without {_typed(name)}.")
    if request.weights is not None and request.layers is not None:
        raise UsageError("--layer goes with a checkpoint, not with --weights.")


def _check_plot(request: CellsRequest) -> None:
    """Raises UsageError for a picture that could not be drawn or written in the end."""
    if request.plot is None:
        return
    from moegeom.routing_cells.pictures.views import check_picture

    check_picture(request)
