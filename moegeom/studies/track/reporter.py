"""Reporters of a series of checkpoints, and what an export is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moegeom.core.registry import Registry
from moegeom.core.series import Series
from moegeom.document._reporter import Reporter


@dataclass(frozen=True)
class SeriesExport:
    """``write`` puts a series into a file or a folder that other tools read."""

    name: str
    write: Callable[[Series, Path], None]


#: Reporters by file name.
SERIES_REPORTERS: Registry[Reporter[Series]] = Registry(
    "format", "moegeom.studies.track.screen", "REPORTER", Reporter
)

#: Exports by file name.
SERIES_EXPORTS: Registry[SeriesExport] = Registry(
    "export", "moegeom.studies.track.exports", "EXPORT", SeriesExport
)
