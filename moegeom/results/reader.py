"""Reading results: tables and run facts, on any machine, months later."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from moegeom.core.documents import DocumentError, parse_json
from moegeom.core.errors import ResultsError
from moegeom.core.files import read_regular
from moegeom.core.limits import MOST_JSON, RESULT_COLUMNS, RESULT_VALUES
from moegeom.core.parquet import parquet_facts, read_columns
from moegeom.core.registry import unknown_name
from moegeom.core.row_keys import ALL, AS_STORED, is_stored_whole
from moegeom.core.text import number_of, quoted
from moegeom.results.run_file import fault

if TYPE_CHECKING:
    import pyarrow as pa

_LOG = logging.getLogger(__name__)

#: Version of the tables and of run.json; a reader refuses others.
SCHEMA_VERSION = 2

#: Key in the metadata of a table under which the columns are listed that would hold nothing.
EMPTY_COLUMNS = b"moegeom_empty_columns"

RUN_FILE = "run.json"

#: Tables, and what people print or draw of results and leave beside them; weights have others.
_SUFFIXES = frozenset([".parquet", ".md", ".html", ".txt", ".csv", ".xml", ".svg", ".png", ".pdf"])


class ResultsView(Protocol):
    """Results as those who judge and print them see them: on disk, or in memory."""

    @property
    def run(self) -> Mapping[str, Any]: ...

    def rows(self, name: str) -> Sequence[Mapping[str, Any]]: ...


class _Row(dict[str, Any]):
    """A row; what is not there was not written by a scan of this version."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._where = where

    def __missing__(self, column: str) -> Any:
        raise ResultsError(
            f"{self._where}: there is no column '{column}', or not of its type.",
            "Another moegeom wrote it, or not all of it is there: run the scan again.",
        )


@dataclass(frozen=True, repr=False)
class Results:
    """A results directory. ``run`` is ``run.json``; tables are read when asked for.

    Without a ``path`` the tables are those of ``memory``.
    """

    path: Path | None
    run: dict[str, Any]
    memory: Mapping[str, pa.Table] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The path; ``results in memory`` where there is none."""
        return "results in memory" if self.path is None else str(self.path)

    def __repr__(self) -> str:
        tokens = (self.run.get("tokens") or {}).get("num_tokens", 0)
        routers = number_of(len(self.run["routers"]), "router")
        return f"Results({self.name!r}: {routers}, {number_of(tokens, 'token')})"

    def in_memory(self) -> Results:
        """The same with all tables in memory, whatever becomes of the directory."""
        return Results(None, self.run, {name: self.table(name) for name in self.tables()})

    def layers(self, variant: str = AS_STORED, population: str = ALL) -> pa.Table:
        """One row for each router, in the order of the layers, of one variant and population.

        ``router``, ``stack``, ``layer``, ``num_experts`` and ``top_k`` come first; columns that
        hold nothing are left out.
        """
        import pyarrow.compute as pc

        is_selected = (pc.field("variant") == variant) & (pc.field("population") == population)
        table = self.table("layers").filter(is_selected).drop_columns(["variant", "population"])
        return table.select([n for n in table.column_names if table[n].null_count < len(table)])

    def tables(self) -> list[str]:
        """Names of the tables, sorted."""
        if self.path is None:
            return sorted(self.memory)
        return sorted(path.stem for path in self.path.glob("*.parquet"))

    def table(self, name: str) -> pa.Table:
        """The table ``<name>.parquet``; ``layers`` with the columns that are derived from others.

        Columns that its file lists in its metadata, as nothing is known of them, are null.

        Raises
        ------
        ResultsError
            When it is not there, cannot be read, or would take much more memory than its file.
        UsageError
            When there is no table of that name in memory.
        """
        import pyarrow as pa

        if self.path is None:
            if name not in self.memory:
                raise unknown_name("table", name, self.memory)
            return self.memory[name]
        path = self.path / f"{name}.parquet"
        try:
            facts = parquet_facts(path)
            listed = (facts.schema.metadata or {}).get(EMPTY_COLUMNS, b"").decode(errors="replace")
            empty = {*listed.split(",")} - {"", *facts.names}
            columns, most = len(facts.names) + len(empty), RESULT_VALUES + path.stat().st_size
            values = facts.count_values() + len(empty) * sum(facts.sizes)
            if values > most or columns > RESULT_COLUMNS:
                raise DocumentError(
                    f"has {values:,} values in {columns:,} columns; at most {most:,} in "
                    f"{RESULT_COLUMNS:,} are read"
                )
            table = read_columns(facts, facts.names)
            for column in sorted(empty):
                table = table.append_column(column, pa.nulls(len(table)))
        except (OSError, DocumentError) as error:
            raise ResultsError(
                f"{path}: table cannot be read: {error}.", "Run the scan again."
            ) from error
        return table

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The table as a list of rows.

        Columns that do not hold what this version writes there are left out. To ask a row for a
        column that it has not is a ResultsError.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        from moegeom.results.schema import KEYS, fits

        table = self.table(name)
        where = self._where(name)
        table = table.select([field.name for field in table.schema if fits(name, field)])
        for key in {column.name for column in KEYS} & {*table.column_names}:
            if table.column(key).null_count:
                raise ResultsError(f"{where}: column '{key}' has rows without a value.")
        for column in table.schema:  # what is not known is written as null
            values = table[column.name]
            if (
                pa.types.is_floating(column.type)
                and pc.call_function("any", [pc.call_function("is_nan", [values])]).as_py()
            ):
                raise ResultsError(f"{where}: column '{column.name}' holds nan.")
        try:
            rows: list[dict[str, Any]] = [_Row(where, row) for row in table.to_pylist()]
        except ValueError as error:  # a text that is no text
            raise ResultsError(f"{where}: cannot be read: {error}.") from None
        if "router" in table.column_names:
            self._check_routers(name, rows)
        return rows

    def columns(
        self, name: str, names: Sequence[str], **equal: str | Sequence[str]
    ) -> dict[str, list[Any]]:
        """Columns of the rows that hold what ``equal`` says, such as ``population="all"``, or one
        of several.

        None stands for what is not known.

        Raises
        ------
        ResultsError
            As :meth:`table`; when a column is not there, or not of its type.
        """
        import pyarrow.compute as pc

        from moegeom.results.schema import fits

        table = self.table(name)
        for column in (*names, *equal):
            index = table.schema.get_field_index(column)
            if index < 0 or not fits(name, table.schema.field(index)):
                return _Row(self._where(name), {})[column]
        table = table.select(list(dict.fromkeys((*names, *equal))))
        for column, value in equal.items():
            table = table.filter(
                pc.field(column).isin([value] if isinstance(value, str) else [*value])
            )
        cells = {column: table[column].to_pylist() for column in names}
        routers = {router["name"] for router in self.run["routers"]}
        self._refuse_foreign(name, {*cells.get("router", ())} - routers)
        return cells

    def _where(self, name: str) -> str:
        """The name of a table in messages."""
        return f"{self.name}, {name}" if self.path is None else f"{self.path / name}.parquet"

    def _check_routers(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows belong to routers of the run; where all tables begin, each of them has some."""
        routers = {router["name"] for router in self.run["routers"]}
        wrong = {row["router"] for row in rows} - routers
        if name in ("layers", "experts"):
            wrong |= routers - {row["router"] for row in rows if is_stored_whole(row)}
            keys = ("router", "variant", "population", "expert")
            repeated = len(rows) - len({tuple(row.get(key) for key in keys) for row in rows})
            if repeated:
                raise ResultsError(
                    f"{self._where(name)}: {number_of(repeated, 'row')} with the router, variant "
                    "and population of another.",
                    "It is not as a scan wrote it: scan again.",
                )
        self._refuse_foreign(name, wrong)

    def _refuse_foreign(self, name: str, wrong: Collection[object]) -> None:
        if wrong:
            raise ResultsError(
                f"{self._where(name)}: router {min(map(str, wrong))[:60]!r} is not in it and in "
                f"{RUN_FILE} alike.",
                "Files of two scans lie together: scan again.",
            )


def is_results(path: str | Path) -> bool:
    """True for a folder that is results and nothing else.

    Whoever makes a checkpoint can put results of another one beside its weights: a folder that
    holds anything beyond results, and reports and pictures of them, is no results folder.
    """
    folder = Path(path)
    if not (folder / RUN_FILE).is_file():
        return False
    return all(_is_of_results(entry) for entry in folder.iterdir())


def _is_of_results(entry: Path) -> bool:
    if entry.name == "tokens" and entry.is_dir():
        return all(path.suffix == ".parquet" and path.is_file() for path in entry.iterdir())
    is_known = entry.suffix in _SUFFIXES or entry.name in (RUN_FILE, ".DS_Store")
    return is_known and entry.is_file()


def results_at(target: str | Results) -> Results | None:
    """The results in a folder, or those that are given; None for anything else.

    Raises
    ------
    ResultsError
        As :func:`open_results`.
    """
    if isinstance(target, Results):
        return target
    return open_results(target) if is_results(target) else None


def open_results(path: str | Path) -> Results:
    """The results in directory ``path``.

    Raises
    ------
    ResultsError
        When there is no ``run.json``, or when it is of a later schema.
    """
    folder = Path(path)
    file = folder / "run.json"
    _LOG.info("%s: results", folder)
    try:
        run = parse_json(read_regular(file, MOST_JSON, True))
    except (OSError, DocumentError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it {error}"
        raise ResultsError(
            f"{folder}: no results: run.json cannot be read ({reason}).",
            "`moegeom scan` writes results; an unfinished run ends in .partial.",
        ) from error
    schema = run.get("schema") if isinstance(run, dict) else None
    if schema != SCHEMA_VERSION:
        raise ResultsError(
            f"{file}: schema {quoted(schema)}; this moegeom reads schema {SCHEMA_VERSION}.",
            "Read it with the moegeom that wrote it, or scan again.",
        )
    wrong = fault(run)
    if wrong:
        raise ResultsError(f"{file}: {wrong}.", "It is not as a scan wrote it: scan again.")
    return Results(folder, run)


# ------------------------------------------------------------------ results that were never written
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class MemoryResults:
    """Facts of a run, and rows of each table by its name."""

    run: Mapping[str, Any]
    tables: Mapping[str, Rows]

    def rows(self, name: str) -> Rows:
        """The table as a list of rows of plain values; empty when nothing fills it."""
        return self.tables.get(name, ())


# ------------------------------------------------------------------------------------- plain values
def finite_column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray | None:
    """A column of rows as an array; None unless every row has it, and finite."""
    values = [row.get(name) for row in rows]
    if not values or any(value is None for value in values):
        return None
    array = np.array(values, dtype=np.float64)
    return array if np.isfinite(array).all() else None


def plain_value(value: Any) -> Any:
    """A list, number, text, truth value or None; nan is None."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value


def plain_column(values: Sequence[Any] | np.ndarray) -> list[Any]:
    """The same for each value of a column, at the speed of the whole."""
    if not isinstance(values, np.ndarray):
        return [plain_value(value) for value in values]
    if values.dtype.kind != "f":
        return values.tolist()
    return [None if value != value else value for value in values.tolist()]
