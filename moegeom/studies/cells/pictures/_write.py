"""Writing a picture: the form follows the ending of the file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    TokenMarks,
    expert_set_text,
    picture_options,
)
from moegeom.studies.cells.pictures._plane_view import draw_cells, draw_expert
from moegeom.studies.cells.pictures._polygons import areas
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


# ------------------------------------------------------------------------------------------ numbers
def figure_csv(picture: SlicePicture) -> dict[str, str]:
    """Tables by name, with a head each; numbers are written so that they read back exactly.

    Of a plane: cells, polygons, facets; of pixels: expert sets, labels, states (a line per row, the
    lowest first); of space: nodes, facets; of a circle: arcs; and tokens where there are any.
    """
    match picture:
        case PlaneCells():
            return {**_plane(picture), **_tokens(picture.tokens)}
        case RasterCells():
            return {**_raster(picture), **_tokens(picture.tokens)}
        case SpaceCells():
            return _space(picture)
        case CircleCells():
            return _circle(picture)


def _table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(lines)
    return text.getvalue()


def _plane(picture: PlaneCells) -> dict[str, str]:
    names = [expert_set_text(expert_set) for expert_set in picture.expert_sets]
    sizes, gradient = areas(picture).tolist(), picture.gradient.tolist()
    cells = zip(names, sizes, *zip(*gradient, strict=True), picture.offset.tolist(), strict=True)
    corners = (
        (cell, names[cell], *corner)
        for cell, polygon in enumerate(picture.polygons)
        for corner in polygon.tolist()
    )
    facets = (
        (out, into, *pair, *ends[0], *ends[1])
        for out, into, pair, ends in zip(
            picture.facet_out.tolist(),
            picture.facet_into.tolist(),
            picture.facet_cells.tolist(),
            picture.facet_ends.tolist(),
            strict=True,
        )
    )
    return {
        "cells": _table(
            ["cell", "experts", "area", "gradient_x", "gradient_y", "offset"],
            ((cell, *rest) for cell, rest in enumerate(cells)),
        ),
        "polygons": _table(["cell", "experts", "x", "y"], corners),
        "facets": _table(
            ["out", "into", "cell_of_out", "cell_of_into", "x0", "y0", "x1", "y1"], facets
        ),
    }


def _tokens(tokens: TokenMarks | None) -> dict[str, str]:
    if tokens is None:
        return {}
    columns: dict[str, list[Any]] = {
        "x": tokens.place[:, 0].tolist(),
        "y": tokens.place[:, 1].tolist(),
        "is_own": tokens.is_own.astype(int).tolist(),
    }
    if tokens.distance is not None:
        columns["distance"] = tokens.distance.tolist()
    if tokens.number is not None:
        columns["token"] = tokens.number.tolist()
    return {"tokens": _table(list(columns), zip(*columns.values(), strict=True))}


def _raster(picture: RasterCells) -> dict[str, str]:
    x0, x1, y0, y1 = picture.frame
    height, width = picture.label.shape
    across = [x0 + (column + 0.5) * (x1 - x0) / width for column in range(width)]
    upwards = [y0 + (row + 0.5) * (y1 - y0) / height for row in range(height)]

    def rows(values: list[list[int]]) -> str:
        return _table(
            ["y", *map(repr, across)], ([y, *row] for y, row in zip(upwards, values, strict=True))
        )

    names = ((label, expert_set_text(c)) for label, c in enumerate(picture.expert_sets))
    return {
        "expert_sets": _table(["label", "experts"], names),
        "labels": rows(picture.label.tolist()),
        "states": rows(picture.state.tolist()),
    }


def _space(picture: SpaceCells) -> dict[str, str]:
    inside = picture.tokens_inside
    counts = [""] * len(picture.place) if inside is None else inside.tolist()
    nodes = (
        (cell, expert_set_text(expert_set), *place, count)
        for cell, (expert_set, place, count) in enumerate(
            zip(picture.expert_sets, picture.place.tolist(), counts, strict=True)
        )
    )
    facets = zip(
        picture.out.tolist(),
        picture.into.tolist(),
        picture.facets[:, 0].tolist(),
        picture.facets[:, 1].tolist(),
        strict=True,
    )
    return {
        "nodes": _table(["cell", "experts", "x", "y", "z", "tokens"], nodes),
        "facets": _table(["out", "into", "cell_of_out", "cell_of_into"], facets),
    }


def _circle(picture: CircleCells) -> dict[str, str]:
    names = map(expert_set_text, picture.expert_sets)
    arcs = zip(names, picture.start.tolist(), picture.stop.tolist(), strict=True)
    tables = {"arcs": _table(["experts", "start", "stop"], arcs)}
    if picture.token_angle is not None:
        angles = picture.token_angle.tolist()
        own = [""] * len(angles) if picture.is_own is None else picture.is_own.astype(int).tolist()
        tables["tokens"] = _table(["angle", "is_own"], zip(angles, own, strict=True))
    return tables
