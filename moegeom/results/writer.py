"""Writing results so that they are whole or absent, and an interrupted run can go on.

``OUT.partial/`` holds the plan, one part per finished router and snapshots of the running one.
Everything is put together in ``OUT.partial/whole`` and moved to ``OUT`` in one rename.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moegeom.core.errors import ResultsError, UsageError
from moegeom.core.metric import Metric
from moegeom.results.reader import SCHEMA_VERSION
from moegeom.results.schema import (
    OTHER_TABLES,
    arrow_schema,
    metric_tables,
    other_schema,
    table_of,
)

Rows = Mapping[str, Sequence[Mapping[str, Any]]]


def slug(router: str) -> str:
    """A router's name as a file name."""
    return router.replace("/", ".")


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
    ) -> None:
        self._out = out
        self._partial = out.with_name(out.name + ".partial")
        self._metrics = tuple(metrics)
        self._plan = json.loads(json.dumps(plan))
        self._restart = restart

    def __enter__(self) -> ResultsWriter:
        refuse_existing(self._out)
        try:
            self._partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{self._partial}: cannot be made ({error.strerror}).", "Choose another --out."
            ) from None
        self._lock = (self._partial / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UsageError(
                f"{self._partial} is being written by another process.",
                "Wait for it, or choose another --out.",
            ) from None
        try:
            refuse_existing(self._out)  # another process may have finished while we took the lock
            if self._restart:
                self._discard()
            self._agree_on_plan()
            for folder in ("parts", "snapshots"):
                (self._partial / folder).mkdir(exist_ok=True)
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()
        # nothing to resume: leave no trace of a run that failed before it measured anything
        if self._partial.exists() and not any(self._partial.glob("[ps]*s/*")):
            shutil.rmtree(self._partial, ignore_errors=True)

    def has_part(self, router: str) -> bool:
        """True when this router was finished, now or before an interruption."""
        return self.part_folder(router).is_dir()

    def snapshot_path(self, router: str, variant: str) -> Path:
        """Where the progress of a running scan is kept."""
        return self._partial / "snapshots" / f"{slug(router)}.{variant}.npz"

    def new_part(self, router: str) -> Path:
        """An empty folder for the files of one router; becomes a part with :meth:`add_part`."""
        folder = self._partial / f"new.{slug(router)}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def add_part(self, router: str, folder: Path, rows: Rows, facts: Mapping[str, Any]) -> None:
        """Writes the rows of one router beside what ``folder`` holds, and counts it as finished."""
        for table in metric_tables(self._metrics):
            schema = arrow_schema(table, self._metrics)
            pq.write_table(table_of(rows.get(table, []), schema), folder / f"{table}.parquet")
        (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        folder.rename(self.part_folder(router))
        for snapshot in (self._partial / "snapshots").glob(f"{slug(router)}.*.npz"):
            snapshot.unlink()

    def part_folder(self, router: str) -> Path:
        """The folder of a finished router, with what was put there beside its rows."""
        return self._partial / "parts" / slug(router)

    def part_facts(self, router: str) -> dict[str, Any]:
        """What :meth:`add_part` was given as facts."""
        path = self.part_folder(router) / "facts.json"
        return json.loads(path.read_text(encoding="utf-8"))

    def gather(self, table: str, routers: Sequence[str]) -> pa.Table:
        """Rows of a metric table of all routers, in that order."""
        parts = [self.part_folder(router) / f"{table}.parquet" for router in routers]
        return pa.concat_tables([pq.read_table(part) for part in parts])

    def finish(self, routers: Sequence[str], run: Mapping[str, Any], others: Rows) -> Path:
        """Puts the parts together, writes ``run.json`` and moves everything to ``out``."""
        whole = self._partial / "whole"
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir()
        for table in metric_tables(self._metrics):
            pq.write_table(self.gather(table, routers), whole / f"{table}.parquet")
        for table in OTHER_TABLES:
            rows = table_of(others.get(table, []), other_schema(table))
            pq.write_table(rows, whole / f"{table}.parquet")
        for router in routers:
            tokens = self.part_folder(router) / "tokens.parquet"
            if tokens.exists():
                (whole / "tokens").mkdir(exist_ok=True)
                _link(tokens, whole / "tokens" / f"{slug(router)}.parquet")
        text = json.dumps({"schema": SCHEMA_VERSION, **run}, indent=1, sort_keys=True)
        (whole / "run.json").write_text(text + "\n", encoding="utf-8")
        _sync(whole)
        whole.rename(self._out)
        self._forget_plan()
        shutil.rmtree(self._partial, ignore_errors=True)
        return self._out

    def _forget_plan(self) -> None:
        """Before parts are removed: without a plan, what is left of them is never resumed from."""
        (self._partial / "plan.json").unlink(missing_ok=True)

    def _discard(self) -> None:
        self._forget_plan()
        for entry in self._partial.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()

    def _agree_on_plan(self) -> None:
        path = self._partial / "plan.json"
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._discard()
            path.write_text(json.dumps(self._plan), encoding="utf-8")
            return
        if before != self._plan:
            changed = sorted(
                key for key in {*before, *self._plan} if before.get(key) != self._plan.get(key)
            )
            raise UsageError(
                f"{self._partial} holds unfinished results of another run: "
                f"{', '.join(changed)} differ.",
                "--restart discards them; or choose another --out.",
            )


def _link(source: Path, target: Path) -> None:
    """The same file under a second name; a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def refuse_existing(out: Path) -> None:
    """Raises UsageError when ``out`` exists, before anything is read or computed."""
    if out.exists():
        raise UsageError(f"{out} exists already.", "Choose another --out, or remove it first.")
    if not out.name:
        raise UsageError(f"--out {out} names no directory.")


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
