"""Files inside files: a range of a file, or bytes that were read, seen as a file of their own."""

from __future__ import annotations

from dataclasses import dataclass

from moegeom.checkpoint.reading import RangeFile
from moegeom.core.errors import CheckpointError


@dataclass(frozen=True)
class FilePart:
    """Bytes ``[offset, offset + length)`` of a file; reads are counted where the file counts."""

    file: RangeFile
    offset: int
    length: int
    label: str

    def size_bytes(self) -> int:
        return self.length

    def read(self, offset: int, size: int) -> bytes:
        _check_inside(self.label, self.length, offset, size)
        return self.file.read(self.offset + offset, size)

    def read_all(self, limit: int) -> bytes:
        _check_limit(self.label, self.length, limit)
        return self.read(0, self.length)


@dataclass(frozen=True)
class LoadedPart:
    """Bytes that were read before, as a file."""

    raw: bytes
    label: str

    def size_bytes(self) -> int:
        return len(self.raw)

    def read(self, offset: int, size: int) -> bytes:
        _check_inside(self.label, len(self.raw), offset, size)
        return self.raw[offset : offset + size]

    def read_all(self, limit: int) -> bytes:
        _check_limit(self.label, len(self.raw), limit)
        return self.raw


def _check_inside(label: str, length: int, offset: int, size: int) -> None:
    if offset < 0 or size < 0 or offset + size > length:
        raise CheckpointError(
            f"{label}: truncated, bytes {offset} to {offset + size} were expected and it has "
            f"{length}."
        )


def _check_limit(label: str, length: int, limit: int) -> None:
    if length > limit:
        raise CheckpointError(f"{label}: has {length} bytes, more than the {limit} allowed.")
