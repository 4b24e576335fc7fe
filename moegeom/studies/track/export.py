"""What an export of a series is, and which are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moegeom.core.errors import UsageError
from moegeom.core.extras import refuse_absent
from moegeom.core.files import refuse_unwritable
from moegeom.core.registry import Registry, unknown_name
from moegeom.core.series import Series
from moegeom.studies.track.record import TrackRequest


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


def requested_exports(request: TrackRequest) -> Iterator[tuple[SeriesExport, Path]]:
    """Exports with their paths, better refused before the measuring than after it.

    Raises
    ------
    UsageError
        For what is no export, needs what is not installed, or cannot be written.
    """
    for entry in request.export:
        name, sign, path = entry.partition(":")
        if name not in SERIES_EXPORTS.names():
            raise unknown_name("export", name, SERIES_EXPORTS.names())
        if not sign or not path:
            raise UsageError(f"--export {entry}: expected {name}:PATH.")
        SERIES_EXPORTS[name].refuse_absent()
        yield SERIES_EXPORTS[name], _writable(Path(path), f"--export {entry}")


def _writable(path: Path, option: str) -> Path:
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option}: the folder {path.parent} does not exist.")
    if not path.is_dir():  # a folder of TensorBoard
        refuse_unwritable(path)
    return path
