"""Reading parts of a file that nobody vouches for, and remembering which parts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Protocol

from moegeom.core.errors import CheckpointError
from moegeom.core.files import open_raw


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
                "Download or copy this file again.",
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
