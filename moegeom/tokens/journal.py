"""What an interrupted recording needs to go on: a line for each shard that is complete."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from moegeom.core.errors import UsageError

JOURNAL_FILE = "journal.jsonl"

#: A shard is a few hundred bytes of journal: a larger one is not ours.
_MAX_BYTES = 64 << 20


class Journal:
    """``journal.jsonl`` in the folder of an unfinished recording; one process writes at a time.

    The first line is the plan, every further line an entry. A line is complete or absent: the last
    one, cut off by the end of a process, counts as absent.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self._path = folder / JOURNAL_FILE
        self._name = folder.name
        self._plan = json.loads(json.dumps(plan))
        self._file: IO[bytes] | None = None

    def open(self, restart: bool) -> list[dict[str, Any]]:
        """Takes the journal over; returns the entries of the run before, none for a new one.

        Raises
        ------
        UsageError
            When another process has it, or the run before was of another plan and ``restart`` is
            not set.
        """
        self._file = self._path.open("a+b")
        try:
            self._lock()
            entries = [] if restart else self._entries()
            if not entries:
                self._file.truncate(0)
                self.add(self._plan)
        except BaseException:
            self.close()
            raise
        return entries[1:]

    def _lock(self) -> None:
        assert self._file is not None, "open() opens it"
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"{self._name} is being written by another process.",
                "Wait for it, or choose another output.",
            ) from None

    def _entries(self) -> list[dict[str, Any]]:
        """Plan and entries as found; what follows the last complete line is cut off."""
        assert self._file is not None, "open() opens it"
        self._file.seek(0)
        found, length = _complete_lines(self._file.read(_MAX_BYTES))
        self._file.truncate(length)
        if found and found[0] != self._plan:
            self._refuse(found[0])
        return found

    def _refuse(self, before: Mapping[str, Any]) -> None:
        changed = sorted(
            key for key in {*before, *self._plan} if before.get(key) != self._plan.get(key)
        )
        first = changed[0]
        raise UsageError(
            f"{self._name} holds an unfinished recording of something else: {first} was "
            f"{before.get(first)!r} and is {self._plan.get(first)!r}"
            + (f" ({', '.join(changed[1:])} differ too)." if changed[1:] else "."),
            "--restart begins again; or choose another output.",
        )

    def add(self, entry: Mapping[str, Any]) -> None:
        """Notes that a shard is complete; on the disk when this returns."""
        assert self._file is not None, "open() comes first"
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Lets go of the file and of its lock."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _complete_lines(text: bytes) -> tuple[list[dict[str, Any]], int]:
    """Objects of the complete lines, and how many bytes these take."""
    found: list[dict[str, Any]] = []
    length = 0
    for line in text.splitlines(keepends=True):
        try:
            entry = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            break
        found.append(entry)
        length += len(line)
    return found, length


def recorded_tokens(path: Path, plan: Mapping[str, Any]) -> int:
    """Tokens in the complete shards of the unfinished recording ``path``, if it is of this plan.

    ``plan`` is what the writer was given as its journal. 0 where there is none: what is wrong with
    one of another plan is said by the writer that is to go on with it.
    """
    journal = path.with_name(f"{path.name}.partial") / JOURNAL_FILE
    try:
        with journal.open("rb") as file:
            lines, _ = _complete_lines(file.read(_MAX_BYTES))
    except OSError:
        return 0
    expected = json.loads(json.dumps(plan))
    if not lines or any(lines[0].get(key) != value for key, value in expected.items()):
        return 0
    return sum(entry["num_tokens"] for entry in lines[1:])
