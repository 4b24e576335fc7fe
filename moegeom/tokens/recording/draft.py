"""The folder of a recording under construction, with a journal to go on from or without."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from moegeom.core.files import WorkFolder, move_folder, refuse_existing, remove, writing
from moegeom.tokens.recording.journal import (
    FILES_FOLDER,
    JOURNAL_FILE,
    Journal,
    Noted,
    shard_file_names,
)
from moegeom.tokens.recording.shard_arrays import ShapeBook


class Draft(Protocol):
    """Where a recording is until it is complete; ``files`` is the folder that becomes it."""

    @property
    def files(self) -> Path: ...

    def begin(self, book: ShapeBook) -> Sequence[Noted]:
        """Makes the folder, or takes over what is there: the shards that are complete."""
        ...

    def note(self, num_tokens: int, domains: tuple[str, ...], book: ShapeBook) -> None:
        """Counts the next shard as complete."""
        ...

    def publish(self) -> None:
        """Gives the recording its name."""
        ...

    def leave(self) -> None:
        """Ends the work here, published or not."""
        ...


def partial_path(path: Path) -> Path:
    """The folder of the unfinished recording ``path``."""
    return path.with_name(f"{path.name}.partial")


class PlainDraft:
    """``<path>.partial``; unless it is published, nothing stays of it, nor of a killed one."""

    def __init__(self, path: Path) -> None:
        self._path, self._work = path, WorkFolder(partial_path(path), "draft")

    @property
    def files(self) -> Path:
        return self._work.path / FILES_FOLDER

    def begin(self, book: ShapeBook) -> Sequence[Noted]:
        refuse_existing(self._path)
        self._work.take()
        self._work.clear()
        with writing(self._work.path):
            self.files.mkdir()
        return ()

    def note(self, num_tokens: int, domains: tuple[str, ...], book: ShapeBook) -> None:
        """Nothing: a shard alone is of no use."""

    def publish(self) -> None:
        move_folder(self.files, self._path)

    def leave(self) -> None:
        self._work.release(is_last=True)


class JournalledDraft:
    """``<path>.partial`` with a lock, a journal and the folder ``whole`` of files.

    It stays, however the process ends, as soon as one shard is complete.
    """

    def __init__(self, path: Path, journal: Journal, restart: bool) -> None:
        self._path = path
        self._journal, self._restart = journal, restart
        self._work = WorkFolder(partial_path(path), JOURNAL_FILE)
        self._num_shards = 0

    @property
    def files(self) -> Path:
        return self._work.path / FILES_FOLDER

    def begin(self, book: ShapeBook) -> Sequence[Noted]:
        refuse_existing(self._path)
        self._work.take()
        try:
            refuse_existing(self._path)  # another process may have finished in between
            if self._restart:
                self._work.clear()
            with writing(self._work.path):
                noted = self._journal.open(book)
                self.files.mkdir(exist_ok=True)
                self._remove_strays(noted)
        except BaseException:
            self._release()
            raise
        self._num_shards = len(noted)
        return noted

    def _remove_strays(self, noted: Sequence[Noted]) -> None:
        """Removes what the unfinished shard, or an unfinished end, left."""
        books = enumerate(shard.book for shard in noted)
        names = {name for number, book in books for name in shard_file_names(book, number)}
        for path in self.files.iterdir():
            if path.name not in names:
                remove(path)

    def note(self, num_tokens: int, domains: tuple[str, ...], book: ShapeBook) -> None:
        files = [self.files / name for name in shard_file_names(book, self._num_shards)]
        for file in files:
            _sync(file)
        _sync_folder(self.files)
        size = sum(file.stat().st_size for file in files)
        self._journal.note(Noted(num_tokens, size, domains, book))
        self._num_shards += 1

    def publish(self) -> None:
        _sync_folder(self.files)
        move_folder(self.files, self._path)
        _sync_folder(self._path.parent)
        self._num_shards = 0

    def leave(self) -> None:
        self._release(is_last=not self._num_shards)

    def _release(self, is_last: bool = False) -> None:
        self._journal.close()
        self._work.release(is_last)


def _sync(file: Path) -> None:
    """Waits until a file is on the disk: the journal must not know more than there is."""
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())


def _sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk, where folders can be waited for."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
