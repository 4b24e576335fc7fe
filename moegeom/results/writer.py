"""Writing results so that they are whole or absent, and an interrupted run can go on.

``OUT.partial/`` holds the plan, one part per finished router and snapshots of the running one, and
for tokens of many files what the first pass over them found.
Everything is put together in ``OUT.partial/whole`` and moved to ``OUT`` in one rename.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from moegeom.core.digest import digest_of, digest_of_file
from moegeom.core.documents import DocumentError, parse_json
from moegeom.core.errors import ResultsError, UsageError, first_line
from moegeom.core.files import (
    WorkFolder,
    is_there,
    move_folder,
    read_regular,
    refuse_existing,
    remove,
    write_whole,
    writing,
)
from moegeom.core.limits import MOST_JSON
from moegeom.core.metric import Metric
from moegeom.core.parquet import parquet_facts, read_columns, write_table
from moegeom.core.row_keys import slug
from moegeom.results.plans import FILES_FOLDER, PLAN_FILE, differing_parts, is_begun
from moegeom.results.reader import SCHEMA_VERSION, is_results
from moegeom.results.schema import (
    OTHER_TABLES,
    arrow_schema,
    keyed,
    metric_tables,
    other_schema,
    table_of,
    without_empty,
)

Rows = Mapping[str, Sequence[Mapping[str, Any]]]

#: What the files of a part hash to. Before Arrow reads one: its reader ends the process for some
#: of the bytes that a failing disk leaves.
DIGEST_FILE = "digest"

#: Bytes of tables that are kept in memory until all are put together: what was written a moment ago
#: is not read again, footer by footer.
_MEMORY_BYTES = 1 << 26

_LOG = logging.getLogger(__name__)


class ResultsWriter:
    """The results directory ``out`` while it is made; use as a context manager.

    Raises
    ------
    UsageError
        When ``out`` exists, when another process is writing it, or when the partial results there
        come from another plan and ``restart`` is not set.
    """

    def __init__(
        self,
        out: Path,
        plan: Mapping[str, Any],
        metrics: Sequence[Metric],
        restart: bool = False,
        overwrite: bool = False,
    ) -> None:
        self._out = out
        self._work = WorkFolder(out.with_name(out.name + ".partial"), PLAN_FILE)
        self._partial = self._work.path
        self._schemas = {name: arrow_schema(name, metrics) for name in metric_tables(metrics)}
        self._plan = json.loads(json.dumps(plan))
        self._restart = restart
        self._overwrite = overwrite
        self._sound: set[str] = set()
        self._kept: dict[tuple[str, str], pa.Table] = {}
        self._room = _MEMORY_BYTES
        self._held: dict[str, dict[str, Any]] = {}
        self._gathered: dict[str, pa.Table] = {}

    @property
    def plan(self) -> dict[str, Any]:
        """The settings in which two runs of the same request agree."""
        return self._plan

    def __enter__(self) -> ResultsWriter:
        self._refuse_existing()
        self._work.take()
        try:  # another process may have finished while we took the lock
            self._refuse_existing()
            self._agree_on_plan()
            with writing(self._partial):
                for folder in ("parts", "snapshots"):
                    (self._partial / folder).mkdir(exist_ok=True)
        except BaseException:
            self._work.release(is_last=not is_begun(self._partial))
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # nothing to resume: leave no trace of a run that failed before it measured anything
        is_empty = not is_begun(self._partial)
        if isinstance(error, KeyboardInterrupt):
            done = f"{len(self.finished())} of {len(self._plan['routers'])} routers"
            error.add_note(
                "nothing was measured yet"
                if is_empty
                else f"{done}, and what was begun, are kept in {self._partial}; the same command "
                "goes on there"
            )
        self._work.release(is_last=is_empty)

    def finished(self) -> list[str]:
        """Routers that are done, in the order of the plan."""
        return [router for router in self._plan["routers"] if self.has_part(router)]

    def has_part(self, router: str) -> bool:
        """True when this router was finished, now or before an interruption.

        A part that is not as it was written is none: the router is measured again.
        """
        if router not in self._sound and router not in self._held:
            folder = self.part_folder(router)
            try:
                digest = read_regular(folder / DIGEST_FILE, 64)
                is_sound = digest == _digest(folder)
            except OSError:
                return False
            if not is_sound:
                return False
            self._sound.add(router)
        return True

    def snapshot_path(self, router: str, variant: str) -> Path:
        """Where the progress of a running scan is kept."""
        return self._partial / "snapshots" / f"{slug(router)}.{variant}.npz"

    def new_part(self, router: str) -> Path:
        """An empty folder for the files of one router; becomes a part with :meth:`add_part`."""
        folder = self._partial / f"new.{slug(router)}"
        with writing(self._out):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        return folder

    def add_part(self, router: str, folder: Path, rows: Rows, facts: Mapping[str, Any]) -> None:
        """Writes the rows of one router beside what ``folder`` holds, and counts it as finished."""
        with writing(self._out):
            for table, schema in self._schemas.items():
                if not rows.get(table):
                    continue  # a digest tells this from a file that is lost
                made = table_of(rows[table], schema)
                write_table(made, folder / f"{table}.parquet")
                if made.nbytes <= self._room:
                    self._room -= made.nbytes
                    self._kept[router, table] = made
            (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
            (folder / DIGEST_FILE).write_bytes(_digest(folder))
            if is_there(self.part_folder(router)):
                remove(self.part_folder(router))  # one that was damaged
        move_folder(folder, self.part_folder(router))
        _LOG.info("%s: measured", router)
        self._sound.add(router)
        for snapshot in (self._partial / "snapshots").glob(f"{slug(router)}.*.npz"):
            snapshot.unlink()

    def hold(self, router: str, rows: Rows, facts: Mapping[str, Any]) -> None:
        """Counts a router as finished whose part would take as long to write as to measure again:
        an interruption loses it.
        """
        self._held[router] = json.loads(json.dumps(facts))
        for table, schema in self._schemas.items():
            self._kept[router, table] = table_of(rows.get(table, ()), schema)

    def part_folder(self, router: str) -> Path:
        """The folder of a finished router, with what was put there beside its rows."""
        return self._partial / "parts" / slug(router)

    def part_facts(self, router: str) -> dict[str, Any]:
        """The facts passed to :meth:`add_part` or :meth:`hold`."""
        if router in self._held:
            return self._held[router]
        path = self.part_folder(router) / "facts.json"
        try:
            facts = parse_json(read_regular(path, MOST_JSON))
            if not isinstance(facts, dict) or not isinstance(facts.get("reasons", {}), dict):
                raise DocumentError("holds no facts")
        except (OSError, DocumentError) as error:
            raise _damaged(path, error) from None
        return facts

    def gather(self, table: str, routers: Sequence[str]) -> pa.Table:
        """Rows of a metric table of all routers, in that order."""
        if table not in self._gathered:
            parts = [self._part_rows(table, router) for router in routers]
            self._gathered[table] = pa.concat_tables(parts)
        return self._gathered[table]

    def _part_rows(self, table: str, router: str) -> pa.Table:
        if (router, table) in self._kept:
            return self._kept[router, table]
        part = self.part_folder(router) / f"{table}.parquet"
        if not part.exists():
            return self._schemas[table].empty_table()
        try:
            facts = parquet_facts(part)
            rows = read_columns(facts, facts.names)
        except (OSError, DocumentError) as error:
            raise _damaged(part, error) from None
        if not rows.schema.equals(self._schemas[table]):
            raise _damaged(part, DocumentError("has other columns"))
        return rows.cast(self._schemas[table])  # a list that was read calls its items otherwise

    def finish(self, routers: Sequence[str], run: Mapping[str, Any], others: Rows) -> Path:
        """Puts the parts together, writes ``run.json`` and moves everything to ``out``."""
        whole = self._partial / "whole"
        text = json.dumps({"schema": SCHEMA_VERSION, **run}, indent=1, sort_keys=True)
        tables = {table: self.gather(table, routers) for table in self._schemas}
        tables |= {
            name: table_of(others.get(name, ()), other_schema(name)) for name in OTHER_TABLES
        }
        with writing(self._out):
            shutil.rmtree(whole, ignore_errors=True)
            whole.mkdir()
            for name, table in tables.items():
                table = without_empty(keyed(table, run["routers"]))
                write_table(table, whole / f"{name}.parquet")
            for router in routers:
                tokens = self.part_folder(router) / "tokens.parquet"
                if tokens.exists():
                    (whole / "tokens").mkdir(exist_ok=True)
                    _link(tokens, whole / "tokens" / f"{slug(router)}.parquet")
            (whole / "run.json").write_text(text + "\n", encoding="utf-8")
            _sync(whole)
        # what is there was seen to hold results
        move_folder(whole, self._out, self._partial / "replaced" if self._overwrite else None)
        self._work.release(is_last=True)
        _LOG.info("%s: written", self._out)
        return self._out

    def _refuse_existing(self) -> None:
        may_replace = is_results if self._overwrite else None
        refuse_existing(self._out, "Choose another --out, or --overwrite.", may_replace)

    def _agree_on_plan(self) -> None:
        """Goes on with what is there, or begins: what is no plan has nothing to go on with."""
        before = None if self._restart else _plan_in(self._work.plan)
        if before is None:
            self._work.clear(spared_folder=FILES_FOLDER)
            write_whole(self._work.plan, json.dumps(self._plan))
            return
        if before != self._plan:
            raise UsageError(
                f"{self._partial} holds unfinished results of another run: "
                f"{', '.join(p[:60] for p in differing_parts(before, self._plan)[:20])} differ.",
                "--restart discards them; or choose another --out.",
            )


def _plan_in(path: Path) -> dict[str, Any] | None:
    """The plan of unfinished results; None where there is none, or what a failing disk left."""
    try:
        plan = parse_json(read_regular(path, MOST_JSON))
    except (OSError, DocumentError):
        return None
    return plan if isinstance(plan, dict) else None


def _digest(folder: Path) -> bytes:
    """A hash of the names and contents of the files of a part."""
    paths = sorted(path for path in folder.iterdir() if path.name != DIGEST_FILE)
    return digest_of([(path.name, digest_of_file(path)) for path in paths]).encode()


def _damaged(path: Path, error: Exception) -> ResultsError:
    return ResultsError(
        f"{path}: is not as it was written ({first_line(error)}).",
        "--restart discards the unfinished results.",
    )


def _link(source: Path, target: Path) -> None:
    """The same file under a second name; a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _sync(folder: Path) -> None:
    """Waits until the files are on the disk, so that the rename cannot come before them."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise ResultsError(f"{path.name}: not written: {error.strerror}.") from error
            finally:
                os.close(descriptor)
