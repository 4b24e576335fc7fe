"""Pictures of slices: the records, their captions, their numbers as CSV, and their files."""

from moegeom.studies.cells.pictures._caption import caption_text
from moegeom.studies.cells.pictures._picture import (
    CircleCells,
    PictureOptions,
    PlaneCells,
    RasterCells,
    SliceCaption,
    SlicePicture,
    SpaceCells,
    TokenMarks,
)
from moegeom.studies.cells.pictures._write import check_picture, figure_csv, write_picture

__all__ = [
    "CircleCells",
    "PictureOptions",
    "PlaneCells",
    "RasterCells",
    "SliceCaption",
    "SlicePicture",
    "SpaceCells",
    "TokenMarks",
    "caption_text",
    "check_picture",
    "figure_csv",
    "write_picture",
]
