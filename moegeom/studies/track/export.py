"""What an export of a series is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moegeom.core.extras import refuse_absent
from moegeom.core.registry import Registry
from moegeom.core.series import Series


@dataclass(frozen=True)
class SeriesExport:
    """``write`` puts a series into a file or a folder that other tools read.

    ``package`` is what it needs beside the core, and ``extra`` what brings it.
    """

    name: str
    write: Callable[[Series, Path], None]
    package: str = ""
    extra: str = ""

    def refuse_absent(self) -> None:
        """Raises UsageError when its package is not installed: before the measuring."""
        if self.package:
            refuse_absent(self.package, self.extra, f"{self.name} of a series")


#: Exports by file name.
SERIES_EXPORTS: Registry[SeriesExport] = Registry(
    "export", "moegeom.studies.track.exports", "EXPORT", SeriesExport
)
