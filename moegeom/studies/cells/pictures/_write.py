"""Writing a picture: the form follows the ending of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegeom.core.errors import UsageError
from moegeom.core.extras import refuse_absent
from moegeom.core.files import refuse_unwritable, write_whole
from moegeom.core.registry import nearest_name, unknown_name
from moegeom.document.paper import ENDINGS
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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Draw = Callable[[Any, PictureOptions], "Figure"]

#: How each kind of picture is drawn, by view.
_VIEWS: Mapping[type, Mapping[str, _Draw]] = {
    PlaneCells: {"cells": draw_cells, "expert": draw_expert, "tropical": draw_tropical},
    RasterCells: {"cells": draw_raster},
    SpaceCells: {"cells": draw_space},
    CircleCells: {"cells": draw_circle},
}


def write_picture(picture: SlicePicture, path: Path | str, **options: Any) -> None:
    """Writes the picture whole or not at all; options are those of :class:`PictureOptions`.

    Equal input gives equal bytes. Raises UsageError for an ending other than ENDINGS, for a view
    that this kind of picture has not, and for an unknown option.
    """
    path = Path(path)
    form, chosen = _form(path), picture_options(options)
    views = _VIEWS[type(picture)]
    if chosen.view not in views:
        raise unknown_name(f"view of {type(picture).__name__}", chosen.view, views)
    with page_style():
        content = page_bytes(views[chosen.view](picture, chosen), form, chosen)
    write_whole(path, content)


def check_picture(path: Path, **options: Any) -> None:
    """Raises UsageError for an ending, a view or an option that no picture has.

    And for a file that could not be written: before the picture is computed, not after it.
    """
    _form(path)
    refuse_unwritable(path)
    view = picture_options(options).view
    known = sorted({name for views in _VIEWS.values() for name in views})
    if view not in known:
        raise unknown_name("view of a picture", view, known)


def _form(path: Path) -> str:
    """The ending without its point. Raises UsageError for one that no picture has."""
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise UsageError(
            f"{path.name}: no picture is written with the ending '{path.suffix}'."
            f"{nearest_name(ending, ENDINGS)}",
            f"Known: {', '.join(ENDINGS)}. --html FILE writes the tables as a page.",
        )
    refuse_absent("matplotlib", "plots", f"a picture in {ending}")
    return ending[1:]
