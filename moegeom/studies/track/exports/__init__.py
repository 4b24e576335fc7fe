"""Exports of a series for other tools: what one is, and which a request names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegeom.core.errors import UsageError
from moegeom.core.extras import refuse_absent
from moegeom.core.files import refuse_unwritable
from moegeom.core.registry import Rooms, unknown_name
from moegeom.core.series import Series
from moegeom.studies.track.record import TrackRequest

_PATH = "PATH"


@dataclass(frozen=True)
class SeriesExport:
    """``write`` puts a series where other tools read it: a file or a folder, or a ``target`` of
    theirs.

    ``package`` is what it needs beside the core, and ``extra`` what brings it; ``settings`` a file
    that it obeys where it lies in the working directory.
    """

    name: str
    write: Callable[[Series, Any], None]
    package: str = ""
    extra: str = ""
    target: str = _PATH
    settings: str = ""


def series_rows(
    series: Series,
) -> Iterator[tuple[str, float, str, str, float | None, float | None]]:
    """Router, step, checkpoint, column, value and standard error of every figure at every step."""
    for curve in (*series.curves, *series.expert_loads):
        for step, value, error in zip(series.steps, curve.values, curve.errors, strict=True):
            yield curve.router, step.step, step.name, curve.column, value, error


#: Exports by name.
SERIES_EXPORTS = Rooms("export", "moegeom.studies.track.exports", SeriesExport)


def requested_exports(request: TrackRequest) -> Iterator[tuple[SeriesExport, Path | str]]:
    """Exports with their targets, better refused before the measuring than after it.

    Raises
    ------
    UsageError
        For what is no export, needs what is not installed, or cannot be written.
    """
    for entry in request.export:
        name, sign, target = entry.partition(":")
        if name not in SERIES_EXPORTS.names():
            raise unknown_name("export", name, SERIES_EXPORTS.names())
        export = SERIES_EXPORTS[name]
        if not sign or not target:
            raise UsageError(f"--export {entry}: expected {name}:{export.target}.")
        if export.package:
            refuse_absent(export.package, export.extra, f"{name} of a series")
        if export.target != _PATH:
            yield export, target
            continue
        path = Path(target)
        if not path.absolute().parent.is_dir():
            raise UsageError(f"--export {entry}: the folder {path.parent} does not exist.")
        if not path.is_dir():  # a folder of TensorBoard
            refuse_unwritable(path)
        yield export, path
