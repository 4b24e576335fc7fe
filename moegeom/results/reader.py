"""Reading results: tables and run facts, on any machine, months later."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moegeom.core.errors import ResultsError
from moegeom.results.schema import SCHEMA_VERSION

#: run.json is a few kilobytes; anything beyond this is no run.json.
_LARGEST_RUN_JSON = 64 * 2**20


@dataclass(frozen=True)
class Results:
    """A results directory. ``run`` is ``run.json``; tables are read when asked for."""

    path: Path
    run: dict[str, Any]

    def table(self, name: str) -> pa.Table:
        """The table ``<name>.parquet``."""
        path = self.path / f"{name}.parquet"
        try:
            return pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise ResultsError(
                f"{path}: table cannot be read: {error}", "Run the scan again."
            ) from error

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The table as a list of rows."""
        return self.table(name).to_pylist()


def open_results(path: str | Path) -> Results:
    """The results in directory ``path``.

    Raises
    ------
    ResultsError
        When there is no ``run.json``, or when it is of a later schema.
    """
    folder = Path(path)
    file = folder / "run.json"
    try:
        if file.stat().st_size > _LARGEST_RUN_JSON:
            raise ResultsError(f"{file}: larger than a run.json can be.")
        run = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(
            f"{folder}: no results: run.json cannot be read.",
            "`moegeom scan` writes results; an unfinished run ends in .partial.",
        ) from error
    schema = run.get("schema") if isinstance(run, dict) else None
    if schema != SCHEMA_VERSION:
        raise ResultsError(
            f"{file}: schema {schema!r}; this moegeom reads schema {SCHEMA_VERSION}.",
            "Read it with the moegeom that wrote it, or scan again.",
        )
    return Results(folder, run)
