"""Reading results: tables and run facts, on any machine, months later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moegeom.core.errors import ResultsError

if TYPE_CHECKING:
    import pyarrow as pa

#: Version of the tables and of run.json; a reader refuses others.
SCHEMA_VERSION = 1

#: run.json is a few kilobytes; anything beyond this is no run.json.
_LARGEST_RUN_JSON = 64 * 2**20


class ResultsView(Protocol):
    """Results as those who judge and print them see them: on disk, or in memory."""

    @property
    def run(self) -> Mapping[str, Any]: ...

    def rows(self, name: str) -> Sequence[Mapping[str, Any]]: ...


@dataclass(frozen=True)
class Results:
    """A results directory. ``run`` is ``run.json``; tables are read when asked for."""

    path: Path
    run: dict[str, Any]

    def tables(self) -> list[str]:
        """Names of the tables, sorted."""
        return sorted(path.stem for path in self.path.glob("*.parquet"))

    def table(self, name: str) -> pa.Table:
        """The table ``<name>.parquet``."""
        import pyarrow as pa
        import pyarrow.parquet as pq

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


def is_results(path: str | Path) -> bool:
    """True for a results directory."""
    return (Path(path) / "run.json").is_file()


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
