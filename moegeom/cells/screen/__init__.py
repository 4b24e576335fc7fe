"""Which sets of experts are cells of a slice: the record, and its reporters by file name."""

from moegeom.cells.screen._enumeration import (
    ENUMERATION_REPORTERS,
    Answer,
    Between,
    Cells,
    Enumerations,
    NullCells,
    Outcome,
    RouterCells,
    Visited,
)

__all__ = [
    "ENUMERATION_REPORTERS",
    "Answer",
    "Between",
    "Cells",
    "Enumerations",
    "NullCells",
    "Outcome",
    "RouterCells",
    "Visited",
]
