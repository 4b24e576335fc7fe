"""What the footer of a Parquet file says of its row groups, read without Arrow.

Arrow's own objects for a column of a row group end the process where a footer contradicts itself:
nothing in Python can catch that. This reads the few facts that are needed of the footer's Thrift
(compact protocol), and passes over the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegeom.core.documents import DocumentError
from moegeom.core.files import open_regular

#: Columns of row groups that one file may have; each costs work before anything is decoded.
_MOST_CHUNKS = 100_000

#: Structs in structs; a footer has six.
_DEEPEST = 30

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12

#: Integers of 16, 32 and 64 bits, all written in the same way.
_INTEGERS = (4, 5, 6)


@dataclass(frozen=True)
class Chunk:
    """A column of a row group: its path with dots, its numbers, and the bytes they inflate to."""

    path: str
    num_values: int
    inflated_bytes: int


@dataclass(frozen=True)
class RowGroup:
    """Rows that are stored together."""

    num_rows: int
    chunks: tuple[Chunk, ...]


def read_row_groups(path: Path) -> tuple[RowGroup, ...]:
    """The row groups that the end of a file describes.

    Raises
    ------
    DocumentError
        When it is no footer, lacks what is needed, or describes more than is read.
    OSError
        When the file cannot be read.
    """
    with open_regular(path, follows=True) as file:
        end = file.seek(0, 2)
        file.seek(max(end - 8, 0))
        size = int.from_bytes(file.read(4), "little")
        if file.read() != b"PAR1" or size + 8 > end:
            raise DocumentError("has no footer of Parquet at its end")
        file.seek(end - 8 - size)
        raw = file.read(size)
    try:
        found = _Footer(raw).struct({4: _groups})
        return found.get(4, ())
    except (LookupError, TypeError, UnicodeDecodeError):
        raise DocumentError("has a damaged footer") from None


class _Footer:
    """A cursor in the bytes of a footer. What ends early is an IndexError."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0
        self.left = _MOST_CHUNKS

    def struct(self, wanted: Mapping[int, Callable[[_Footer, int], Any]], depth: int = 0) -> Any:
        """The fields ``wanted`` of a struct, by their numbers."""
        found: dict[int, Any] = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.integer()
            read = wanted.get(number)
            if read is None:
                self.skip(head & 15, depth)
            else:
                found[number] = read(self, head & 15)
        return found

    def skip(self, kind: int, depth: int, is_field: bool = True) -> None:
        """Passes over a value."""
        if depth > _DEEPEST:
            raise DocumentError("has a footer that is nested too deeply")
        if kind in (_TRUE, _FALSE):
            self.at += not is_field  # a field has its truth in its head
        elif kind == _BYTE:
            self.at += 1
        elif kind in _INTEGERS:
            self.varint()
        elif kind == _DOUBLE:
            self.at += 8
        elif kind == _BINARY:
            self.text()
        elif kind in (_LIST, _SET):
            inner, count = self.list_head()
            for _ in range(count):
                self.skip(inner, depth + 1, is_field=False)
        elif kind == _MAP:
            count = self.varint()
            kinds = self.byte() if count else 0
            for _ in range(count):
                self.skip(kinds >> 4, depth + 1, is_field=False)
                self.skip(kinds & 15, depth + 1, is_field=False)
        elif kind == _STRUCT:
            self.struct({}, depth + 1)
        else:
            raise DocumentError("has a damaged footer")

    def byte(self) -> int:
        found = self.raw[self.at]
        self.at += 1
        return found

    def varint(self) -> int:
        found = shift = 0
        while True:
            part = self.byte()
            found |= (part & 127) << shift
            if part < 128:
                return found
            shift += 7
            if shift > 63:
                raise DocumentError("has a damaged footer")

    def integer(self) -> int:
        found = self.varint()
        return (found >> 1) ^ -(found & 1)

    def text(self) -> bytes:
        size = self.varint()
        found = self.raw[self.at : self.at + size]
        if len(found) < size:
            raise IndexError
        self.at += size
        return found

    def list_head(self) -> tuple[int, int]:
        """Kind and number of the elements; each takes a byte at least."""
        head = self.byte()
        count = self.varint() if head >> 4 == 15 else head >> 4
        if count > len(self.raw) - self.at:
            raise IndexError
        return head & 15, count

    def structs(self, kind: int) -> Iterator[None]:
        """Once for each struct of a list, which the caller then reads."""
        inner, count = self.list_head()
        if kind != _LIST or (count and inner != _STRUCT):
            raise TypeError
        yield from [None] * count


def _number(footer: _Footer, kind: int) -> int:
    if kind not in _INTEGERS:
        raise TypeError
    return footer.integer()


def _path(footer: _Footer, kind: int) -> str:
    inner, count = footer.list_head()
    if kind != _LIST or inner != _BINARY:
        raise TypeError
    return ".".join([footer.text().decode() for _ in range(count)])


_OF_CHUNK = {3: _path, 5: _number, 6: _number}


def _facts(footer: _Footer, kind: int) -> Chunk:
    if kind != _STRUCT:
        raise TypeError
    found = footer.struct(_OF_CHUNK)
    if min(found[5], found[6]) < 0:
        raise DocumentError("has columns of less than no bytes")
    return Chunk(found[3], found[5], found[6])


def _chunks(footer: _Footer, kind: int) -> tuple[Chunk, ...]:
    found = []
    for _ in footer.structs(kind):
        footer.left -= 1
        if footer.left < 0:
            raise DocumentError(f"has more than {_MOST_CHUNKS:,} columns in all row groups")
        found.append(footer.struct({3: _facts})[3])
    return tuple(found)


def _groups(footer: _Footer, kind: int) -> tuple[RowGroup, ...]:
    found = []
    for _ in footer.structs(kind):
        group = footer.struct({1: _chunks, 3: _number})
        found.append(RowGroup(group[3], group[1]))
    return tuple(found)
