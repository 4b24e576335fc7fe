"""What an export of a series is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moegeom.core.registry import Registry
from moegeom.core.series import Series


@dataclass(frozen=True)
class SeriesExport:
    """``write`` puts a series into a file or a folder that other tools read."""

    name: str
    write: Callable[[Series, Path], None]


#: Exports by file name.
SERIES_EXPORTS: Registry[SeriesExport] = Registry(
    "export", "moegeom.studies.track.exports", "EXPORT", SeriesExport
)
