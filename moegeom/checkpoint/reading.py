"""Where a checkpoint lies, and reading parts of files that nobody vouches for.

Files by name, on a disk or behind a URL, are read by ranges; which ranges is remembered.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from moegeom.core.errors import CheckpointError
from moegeom.core.files import open_raw


# -------------------------------------------------------------------------------------------- files
@dataclass(frozen=True)
class ByteRange:
    """Bytes ``[offset, offset + size)`` of one file."""

    file: str
    offset: int
    size: int


@dataclass
class ReadLog:
    """Every range that was read, in order; shared by all files of one checkpoint."""

    ranges: list[ByteRange] = field(default_factory=list)

    @property
    def bytes_read(self) -> int:
        return sum(r.size for r in self.ranges)


class RangeFile(Protocol):
    """A file that is read by ranges, wherever it lies."""

    @property
    def label(self) -> str:
        """Its name in messages."""
        ...

    def size_bytes(self) -> int:
        """Length of the file now."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes from ``offset``; fewer is an error."""
        ...

    def read_all(self, limit: int) -> bytes:
        """The whole file, which may not be longer than ``limit``."""
        ...


#: What to do about a file that is shorter than it should be, or contradicts itself.
AGAIN = "Download or copy this file again."


def truncated(file: str, expected: int, size: int) -> CheckpointError:
    """The error for a file that is shorter than its header says."""
    return CheckpointError(
        f"{file}: truncated, has {size} bytes and its header promises {expected}.", AGAIN
    )


def read_whole(file: RangeFile, limit: int) -> bytes:
    """A file, which may not be longer than ``limit``."""
    size = file.size_bytes()
    if size > limit:
        raise CheckpointError(f"{file.label}: has {size} bytes, more than the {limit} allowed.")
    return file.read(0, size)


def stream_size(stream: FileIO) -> int:
    """Length in bytes of an open file."""
    return os.fstat(stream.fileno()).st_size


@dataclass(frozen=True)
class CountingFile:
    """A regular file, opened anew for each read, that writes down what is read.

    Plain reads, not a memory map: a file that shrinks while it is read ends in an error, not in
    SIGBUS.
    """

    path: Path
    label: str
    log: ReadLog

    def size_bytes(self) -> int:
        """Length of the file now."""
        with self.open() as stream:
            return stream_size(stream)

    def read(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes from ``offset``; fewer is an error."""
        with self.open() as stream:
            return self.read_from(stream, offset, size)

    def read_all(self, limit: int) -> bytes:
        """The whole file, which may not be longer than ``limit``."""
        with self.open() as stream:
            size = stream_size(stream)
            if size > limit:
                raise CheckpointError(
                    f"{self.label}: has {size} bytes, more than the {limit} allowed."
                )
            return self.read_from(stream, 0, size)

    def read_from(self, stream: FileIO, offset: int, size: int) -> bytes:
        """As ``read``, from a stream that is already open."""
        try:
            stream.seek(offset)
            # bytes that read() makes are not filled with zeros first, as a bytearray is
            parts = [stream.read(size)]
            while parts[-1] and sum(map(len, parts)) < size:
                parts.append(stream.read(size - sum(map(len, parts))))
        except (MemoryError, OverflowError):
            raise CheckpointError(f"{self.label}: {size} bytes do not fit into memory.") from None
        except OSError as error:
            raise self._unreadable(error) from None
        raw = parts[0] if len(parts) == 1 else b"".join(parts)
        filled = len(raw)
        self.log.ranges.append(ByteRange(self.label, offset, filled))
        if filled < size:
            raise CheckpointError(
                f"{self.label}: truncated, bytes {offset} to {offset + size} were expected and "
                f"the file ends at {offset + filled}.",
                AGAIN,
            )
        return raw

    def open(self) -> FileIO:
        """The file, open for reading; an error unless it is a regular file."""
        try:
            return open_raw(self.path, follows=True)
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> CheckpointError:
        reason = getattr(error, "strerror", None) or type(error).__name__
        return CheckpointError(f"{self.label}: cannot be read ({reason}).")


# ------------------------------------------------------------------------------------------ folders
class Folder(Protocol):
    """A folder of files, by name. Listing it reads no file."""

    @property
    def label(self) -> str:
        """A name to print, without the path to it."""
        ...

    @property
    def log(self) -> ReadLog:
        """What was read of any file in it."""
        ...

    @property
    def parsed(self) -> dict[str, Any]:
        """Objects that were parsed from files of it, by name: a config and an index count once."""
        ...

    @property
    def num_parallel(self) -> int:
        """Reads that are worth making at the same time: 1 where a read costs no waiting."""
        ...

    def files(self) -> Sequence[str]:
        """Names of everything directly in it, sorted."""
        ...

    def has(self, name: str) -> bool:
        """True when the file ``name`` (which may hold ``/``) exists."""
        ...

    def file(self, name: str) -> RangeFile:
        """The file of that name, which need not exist until it is read."""
        ...

    def revision_of(self, names: Collection[str]) -> str:
        """What names this state of the files; "" on a disk, and where nothing tells."""
        ...

    def held(self, name: str, offset: int, size: int) -> AbstractContextManager[None]:
        """While it is open, reads of these bytes cost one request; nothing to do on a disk."""
        ...


@dataclass(frozen=True)
class Location:
    """What somebody pointed at: a folder, or one file in it."""

    folder: Folder
    file: str | None = None

    @property
    def label(self) -> str:
        """The file's name, or the folder's."""
        return self.file or self.folder.label

    @property
    def files(self) -> Sequence[str]:
        """The file alone, or everything in the folder."""
        return self.folder.files() if self.file is None else [self.file]


@dataclass(frozen=True)
class LocalFolder:
    """A folder on a disk."""

    path: Path
    log: ReadLog = field(default_factory=ReadLog)
    num_parallel: int = 1
    parsed: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def label(self) -> str:
        return self.path.resolve().name or "checkpoint"

    def files(self) -> Sequence[str]:
        return sorted(entry.name for entry in self.path.iterdir())

    def has(self, name: str) -> bool:
        try:
            return (self.path / name).exists()
        except (OSError, ValueError):  # too long for the file system, or one it cannot spell
            return False

    def file(self, name: str) -> CountingFile:
        return CountingFile(self.path / name, name, self.log)

    def revision_of(self, names: Collection[str]) -> str:
        return ""

    def held(self, name: str, offset: int, size: int) -> AbstractContextManager[None]:
        return nullcontext()

    def beside(self, name: str) -> LocalFolder:
        """Another folder, by its path from this one; its reads are counted here too."""
        return LocalFolder(self.path.resolve() / name, self.log)


def local(path: Path) -> Location:
    """The location of a path that exists."""
    if path.is_dir():
        return Location(LocalFolder(path))
    return Location(LocalFolder(path.parent), path.name)


# ---------------------------------------------------------------------------------- memory and time
@contextmanager
def no_collection() -> Iterator[None]:
    """While it is open, Python does not search for garbage in cycles.

    A parser makes none, and every search walks through all that it has made so far. It may be
    nested and opened by several threads: afterwards the search is as it was before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
