"""May an exported checkpoint stand for the one it was made of: the record, and its reporters."""

from moegeom.studies.signoff.screen._signoff import (
    LINE_NAMES,
    SIGNOFF_REPORTERS,
    Line,
    LineName,
    LineState,
    SignOff,
    Switches,
)

__all__ = [
    "LINE_NAMES",
    "SIGNOFF_REPORTERS",
    "Line",
    "LineName",
    "LineState",
    "SignOff",
    "Switches",
]
