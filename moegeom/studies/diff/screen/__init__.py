"""What differs between two checkpoints or results: the record, and its reporters by file name."""

from moegeom.studies.diff.screen._difference import (
    DIFFERENCE_REPORTERS,
    Change,
    Difference,
    FigureChange,
    Figures,
    RouterChange,
    Side,
    percent,
)

__all__ = [
    "DIFFERENCE_REPORTERS",
    "Change",
    "Difference",
    "FigureChange",
    "Figures",
    "RouterChange",
    "Side",
    "percent",
]
