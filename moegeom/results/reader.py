"""Reading results: tables and run facts, on any machine, months later."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moegeom.core.documents import DocumentError, parse_json
from moegeom.core.errors import ResultsError
from moegeom.core.files import read_regular
from moegeom.core.limits import MOST_JSON, RESULT_COLUMNS, RESULT_VALUES
from moegeom.core.parquet import parquet_facts, read_columns
from moegeom.core.registry import unknown_name
from moegeom.core.row_keys import ALL, AS_STORED, is_whole
from moegeom.core.text import number_of, quoted
from moegeom.results.derived import with_derived
from moegeom.results.run_file import fault

if TYPE_CHECKING:
    import pyarrow as pa

#: Version of the tables and of run.json; a reader refuses others.
SCHEMA_VERSION = 1

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

        ``router``, ``layer``, ``num_experts`` and ``top_k`` come first; columns that hold nothing
        are left out.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        is_asked = (pc.field("variant") == variant) & (pc.field("population") == population)
        table = self.table("layers").filter(is_asked)
        row = {name: number for number, name in enumerate(table["router"].to_pylist())}
        facts = [router for router in self.run["routers"] if router["name"] in row]
        table = table.take(pa.array([row[router["name"]] for router in facts], pa.int64()))
        first = {
            "router": table["router"],
            "layer": pa.array([int(router["name"].split("/")[1]) for router in facts]),
            "num_experts": pa.array([router["num_experts"] for router in facts]),
            "top_k": pa.array([router["top_k"] for router in facts]),
        }
        left_out = {"variant", "population", *first}
        names = [n for n in table.column_names if table[n].null_count < len(table)]
        return pa.table(first | {name: table[name] for name in names if name not in left_out})

    def tables(self) -> list[str]:
        """Names of the tables, sorted."""
        if self.path is None:
            return sorted(self.memory)
        return sorted(path.stem for path in self.path.glob("*.parquet"))

    def table(self, name: str) -> pa.Table:
        """The table ``<name>.parquet``; ``layers`` with the columns that are derived from others.

        Raises
        ------
        ResultsError
            When it is not there, cannot be read, or would take much more memory than its file.
        UsageError
            When there is no table of that name in memory.
        """
        if self.path is None:
            if name not in self.memory:
                raise unknown_name("table", name, self.memory)
            return self.memory[name]
        path = self.path / f"{name}.parquet"
        try:
            facts = parquet_facts(path)
            most, values = RESULT_VALUES + path.stat().st_size, facts.count_values()
            if values > most or len(facts.names) > RESULT_COLUMNS:
                raise DocumentError(
                    f"has {values:,} values in {len(facts.names):,} columns; at most {most:,} in "
                    f"{RESULT_COLUMNS:,} are read"
                )
            table = read_columns(facts, facts.names)
        except (OSError, DocumentError) as error:
            raise ResultsError(
                f"{path}: table cannot be read: {error}.", "Run the scan again."
            ) from error
        return with_derived(table, self.run["routers"]) if name == "layers" else table

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
            wrong |= routers - {
                row["router"]
                for row in rows
                if row["variant"] == "as_stored" and is_whole(row["population"])
            }
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
