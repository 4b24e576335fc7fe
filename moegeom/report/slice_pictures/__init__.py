"""Pictures of slices: the records, their captions, their numbers as CSV, and their files."""

from moegeom.report.slice_pictures._caption import caption_text
from moegeom.report.slice_pictures._figure_csv import figure_csv
from moegeom.report.slice_pictures._options import PictureOptions
from moegeom.report.slice_pictures._picture import (
    CircleCells,
    PlaneCells,
    RasterCells,
    SliceCaption,
    SlicePicture,
    SpaceCells,
    TokenMarks,
)
from moegeom.report.slice_pictures._write import check_picture, write_picture

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
