"""A slice as a picture in a file, and the numbers behind it as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from moegeom.core.files import refuse_unwritable
from moegeom.core.registry import unknown_name
from moegeom.document import paper
from moegeom.document.chart import Picture
from moegeom.routing_cells.pictures.plane import (
    areas,
    expert_picture,
    plane_picture,
    tropical_picture,
)
from moegeom.routing_cells.pictures.records import (
    CircleCells,
    PictureOptions,
    PlaneCells,
    RasterCells,
    SlicePicture,
    SpaceCells,
    TokenMarks,
    expert_set_text,
)
from moegeom.routing_cells.pictures.views import circle_picture, raster_picture, space_picture

_View = Callable[[Any, PictureOptions], Picture]

#: What each kind of picture shows, by view.
_VIEWS: Mapping[type, Mapping[str, _View]] = {
    PlaneCells: {"cells": plane_picture, "expert": expert_picture, "tropical": tropical_picture},
    RasterCells: {"cells": raster_picture},
    SpaceCells: {"cells": space_picture},
    CircleCells: {"cells": circle_picture},
}

_HINT = f"Known: {', '.join(paper.ENDINGS)}. --html FILE writes the tables as a page."


def write_picture(cells: SlicePicture, path: Path, options: PictureOptions) -> None:
    """Writes the picture whole or not at all; equal input gives equal bytes.

    Raises UsageError for a view that this kind of picture has not.
    """
    views = _VIEWS[type(cells)]
    if options.view not in views:
        raise unknown_name(f"view of {type(cells).__name__}", options.view, views)
    paper.write_picture(views[options.view](cells, options), path)


def check_picture(path: Path, options: PictureOptions) -> None:
    """Raises UsageError for an ending or a view that no picture has.

    And for a file that could not be written: before the picture is computed, not after it.
    """
    paper.refuse_undrawable(path, _HINT)
    refuse_unwritable(path)
    views = sorted({name for views in _VIEWS.values() for name in views})
    if options.view not in views:
        raise unknown_name("view of a picture", options.view, views)


# ------------------------------------------------------------------------------------------ numbers
def figure_csv(cells: SlicePicture) -> dict[str, str]:
    """Tables by name, with a head each; numbers are written so that they read back exactly.

    Of a plane: cells, polygons, facets; of pixels: expert sets, labels, states (a line per row, the
    lowest first); of space: nodes, facets; of a circle: arcs; and tokens where there are any.
    """
    names = [expert_set_text(expert_set) for expert_set in cells.expert_sets]
    match cells:
        case PlaneCells():
            return {**_plane(cells, names), **_tokens(cells.tokens)}
        case RasterCells():
            return {**_raster(cells, names), **_tokens(cells.tokens)}
        case SpaceCells():
            inside = cells.tokens_inside
            x, y, z = cells.place.T.tolist()
            counts = [""] * len(names) if inside is None else inside.tolist()
            number = range(len(names))
            nodes = _table(cell=number, experts=names, x=x, y=y, z=z, tokens=counts)
            return {
                "nodes": nodes,
                "facets": _table(**_exchanged(cells.out, cells.into, cells.facets)),
            }
        case CircleCells():
            return _circle(cells, names)


def _table(**columns: Iterable[Any]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()


def _exchanged(out: Any, into: Any, of_facet: Any) -> dict[str, list]:
    """The experts that serve on either side of each facet, and the cells there."""
    one, other = of_facet.T.tolist()
    return {"out": out.tolist(), "into": into.tolist(), "cell_of_out": one, "cell_of_into": other}


def _plane(cells: PlaneCells, names: list[str]) -> dict[str, str]:
    number = [n for n, polygon in enumerate(cells.polygons) for _ in polygon]
    corners = [corner for polygon in cells.polygons for corner in polygon.tolist()]
    (x0, y0), (x1, y1) = cells.facet_ends.transpose(1, 2, 0).tolist()
    exchanged = _exchanged(cells.facet_out, cells.facet_into, cells.facet_cells)
    return {
        "cells": _table(
            cell=range(len(names)),
            experts=names,
            area=areas(cells).tolist(),
            gradient_x=cells.gradient[:, 0].tolist(),
            gradient_y=cells.gradient[:, 1].tolist(),
            offset=cells.offset.tolist(),
        ),
        "polygons": _table(
            cell=number,
            experts=[names[n] for n in number],
            x=[x for x, _ in corners],
            y=[y for _, y in corners],
        ),
        "facets": _table(**exchanged, x0=x0, y0=y0, x1=x1, y1=y1),
    }


def _tokens(tokens: TokenMarks | None) -> dict[str, str]:
    if tokens is None:
        return {}
    x, y = tokens.place.T.tolist()
    columns: dict[str, list[Any]] = {"x": x, "y": y, "is_own": tokens.is_own.astype(int).tolist()}
    if tokens.distance is not None:
        columns["distance"] = tokens.distance.tolist()
    if tokens.number is not None:
        columns["token"] = tokens.number.tolist()
    return {"tokens": _table(**columns)}


def _raster(cells: RasterCells, names: list[str]) -> dict[str, str]:
    x0, x1, y0, y1 = cells.frame
    height, width = cells.label.shape
    across = [x0 + (column + 0.5) * (x1 - x0) / width for column in range(width)]
    upwards = [y0 + (row + 0.5) * (y1 - y0) / height for row in range(height)]

    def columns(values: Any) -> dict[str, list]:
        return {"y": upwards, **dict(zip(map(repr, across), values.T.tolist(), strict=True))}

    return {
        "expert_sets": _table(label=range(len(names)), experts=names),
        "labels": _table(**columns(cells.label)),
        "states": _table(**columns(cells.state)),
    }


def _circle(cells: CircleCells, names: list[str]) -> dict[str, str]:
    tables = {"arcs": _table(experts=names, start=cells.start.tolist(), stop=cells.stop.tolist())}
    if cells.token_angle is not None:
        angles = cells.token_angle.tolist()
        own = [""] * len(angles) if cells.is_own is None else cells.is_own.astype(int).tolist()
        tables["tokens"] = _table(angle=angles, is_own=own)
    return tables
