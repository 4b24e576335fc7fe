"""Writing a picture: the form follows the ending of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegeom.core.errors import UsageError
from moegeom.core.extras import refuse_absent
from moegeom.core.files import refuse_unwritable, write_whole
from moegeom.core.registry import nearest_name, unknown_name
from moegeom.studies.cells.pictures._circle_view import draw_circle
from moegeom.studies.cells.pictures._page import page_bytes, page_style
from moegeom.studies.cells.pictures._picture import (
    CircleCells,
    PictureOptions,
    PlaneCells,
    RasterCells,
    SlicePicture,
    SpaceCells,
    picture_options,
)
from moegeom.studies.cells.pictures._plane_view import draw_cells, draw_expert
from moegeom.studies.cells.pictures._raster_view import draw_raster
from moegeom.studies.cells.pictures._space_view import draw_space, draw_tropical
from moegeom.studies.cells.pictures._web_plane import (
    cells_page,
    circle_page,
    expert_page,
    raster_page,
    space_page,
    tropical_page,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Draw = Callable[[Any, PictureOptions], "Figure"]
_Page = Callable[[Any, PictureOptions], bytes]

#: How each kind of picture is drawn on paper and for a browser, by view.
_VIEWS: Mapping[type, Mapping[str, tuple[_Draw, _Page]]] = {
    PlaneCells: {
        "cells": (draw_cells, cells_page),
        "expert": (draw_expert, expert_page),
        "tropical": (draw_tropical, tropical_page),
    },
    RasterCells: {"cells": (draw_raster, raster_page)},
    SpaceCells: {"cells": (draw_space, space_page)},
    CircleCells: {"cells": (draw_circle, circle_page)},
}


def _static(form: str) -> Callable[[SlicePicture, PictureOptions], bytes]:
    def render(picture: SlicePicture, options: PictureOptions) -> bytes:
        draw, _ = _view(picture, options)
        with page_style():
            return page_bytes(draw(picture, options), form, options)

    return render


def _browser(picture: SlicePicture, options: PictureOptions) -> bytes:
    _, page = _view(picture, options)
    return page(picture, options)


#: Renderers by the ending of the file.
RENDERERS: Mapping[str, Callable[[SlicePicture, PictureOptions], bytes]] = {
    ".svg": _static("svg"),
    ".pdf": _static("pdf"),
    ".png": _static("png"),
    ".html": _browser,
}


def write_picture(picture: SlicePicture, path: Path | str, **options: Any) -> None:
    """Writes the picture whole or not at all; options are those of :class:`PictureOptions`.

    Equal input gives equal bytes. Raises UsageError for an ending that no renderer has, for a view
    that this kind of picture has not, and for an unknown option.
    """
    path = Path(path)
    content = _renderer(path)(picture, picture_options(options))
    write_whole(path, content)


def check_picture(path: Path, **options: Any) -> None:
    """Raises UsageError for an ending, a view or an option that no picture has.

    And for a file that could not be written: before the picture is computed, not after it.
    """
    _renderer(path)
    refuse_unwritable(path)
    view = picture_options(options).view
    known = sorted({name for views in _VIEWS.values() for name in views})
    if view not in known:
        raise unknown_name("view of a picture", view, known)


def _renderer(path: Path) -> Callable[[SlicePicture, PictureOptions], bytes]:
    ending = path.suffix.lower()
    render = RENDERERS.get(ending)
    if render is None:
        guess = nearest_name(ending, RENDERERS)
        raise UsageError(
            f"{path.name}: no picture is written with the ending '{path.suffix}'.{guess}",
            f"Known: {', '.join(RENDERERS)}.",
        )
    refuse_absent(
        "plotly" if render is _browser else "matplotlib", "plots", f"a picture in {ending}"
    )
    return render


def _view(picture: SlicePicture, options: PictureOptions) -> tuple[_Draw, _Page]:
    views = _VIEWS[type(picture)]
    if options.view not in views:
        raise unknown_name(f"view of {type(picture).__name__}", options.view, views)
    return views[options.view]
