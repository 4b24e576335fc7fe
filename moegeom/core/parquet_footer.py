"""What the footer of a Parquet file says of its row groups, and pages of theirs, without Arrow.

Arrow's own objects for a column of a row group end the process where a footer contradicts itself:
nothing in Python can catch that. And it makes room for whatever the header of a page asks, without
a look at the footer. This reads the few facts that are needed of their Thrift (compact protocol),
and passes over the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from moegeom.core.documents import DocumentError
from moegeom.core.files import open_regular
from moegeom.core.limits import PARQUET_CHUNKS, PARQUET_HEADER_BYTES, PARQUET_PAGES

#: Structs in structs; a footer has six.
_DEEPEST = 30

#: Bytes behind a column that writers of old did not count, and that Arrow reads.
_PADDING = 100

_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_2 = 0, 2, 3

#: Texts as what they have in common with the one before: a page of a megabyte can mean any size.
_DELTA_BYTE_ARRAY = 7

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12

#: Integers of 16, 32 and 64 bits, all written in the same way.
_INTEGERS = (4, 5, 6)


@dataclass(frozen=True)
class Chunk:
    """A column of a row group: its path with dots, its numbers, and the bytes they inflate to.

    Its pages lie in the ``num_bytes`` of the file from ``start`` on.
    """

    path: str
    num_values: int
    inflated_bytes: int
    num_bytes: int
    start: int


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
        fields = _Thrift(raw).struct({4: _groups})
        return fields.get(4, ())
    except (LookupError, TypeError, UnicodeDecodeError):
        raise DocumentError("has a damaged footer") from None


def most_inflated(file: IO[bytes], chunks: Iterable[Chunk]) -> int:
    """Bytes that the pages of some columns of row groups take decoded, by what each page says.

    The footer may say less.

    Raises
    ------
    DocumentError
        When a page has no header, or numbers whose size no header tells.
    """
    total, left = 0, PARQUET_PAGES
    for chunk in chunks:
        seen, at, end = 0, chunk.start, chunk.start + chunk.num_bytes + _PADDING
        while seen < chunk.num_values and at < end:  # as Arrow reads them
            left -= 1
            if left < 0:
                raise DocumentError(f"has more than {PARQUET_PAGES:,} pages to be read at once")
            kind, inflated, numbers, size = _page(file, at)
            total += inflated + 8 * numbers
            seen += numbers if kind != _DICTIONARY_PAGE else 0
            at += size
    return total


def _page(file: IO[bytes], at: int) -> tuple[int, int, int, int]:
    """Kind of a page, bytes that it inflates to, its numbers, and its bytes with the header."""
    file.seek(at)
    header = _Thrift(file.read(PARQUET_HEADER_BYTES))
    try:
        page = header.struct(_OF_PAGE)
        kind, inflated, stored = page[1], page[2], page[3]
        numbers, encoding = _numbers_of(page)
    except (LookupError, TypeError, UnicodeDecodeError):
        raise DocumentError("has a damaged header of a page") from None
    if min(inflated, stored, numbers) < 0:
        raise DocumentError("has pages of less than no bytes")
    if encoding == _DELTA_BYTE_ARRAY:
        raise DocumentError("has texts that are stored as differences; they are not read")
    return kind, inflated, numbers, header.at + stored


def _numbers_of(page: Mapping[int, Any]) -> tuple[int, int]:
    """Numbers of a page, null ones among them, and their encoding; 0 of an index."""
    if page[1] == _DATA_PAGE_2:
        return page[8][1], page[8][4]
    if page[1] in (_DATA_PAGE, _DICTIONARY_PAGE):
        inner = page[5 if page[1] == _DATA_PAGE else 7]
        return inner[1], inner[2]
    return 0, 0


class _Thrift:
    """A cursor in the bytes of a footer or a header. What is damaged is a LookupError."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0
        self.left = PARQUET_CHUNKS

    def struct(self, readers: Mapping[int, Callable[[_Thrift, int], Any]], depth: int = 0) -> Any:
        """The fields of a struct that have ``readers``, by their numbers."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.integer()
            read = readers.get(number)
            if read is None:
                self.skip(head & 15, depth)
            else:
                fields[number] = read(self, head & 15)
        return fields

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
            self.refuse_beyond(count)
            for _ in range(count):
                self.skip(kinds >> 4, depth + 1, is_field=False)
                self.skip(kinds & 15, depth + 1, is_field=False)
        elif kind == _STRUCT:
            self.struct({}, depth + 1)
        else:
            raise LookupError

    def byte(self) -> int:
        byte = self.raw[self.at]
        self.at += 1
        return byte

    def varint(self) -> int:
        number = shift = 0
        while True:
            part = self.byte()
            number |= (part & 127) << shift
            if part < 128:
                return number
            shift += 7
            if shift > 63:
                raise LookupError

    def integer(self) -> int:
        zigzag = self.varint()
        return (zigzag >> 1) ^ -(zigzag & 1)

    def text(self) -> bytes:
        size = self.varint()
        text = self.raw[self.at : self.at + size]
        if len(text) < size:
            raise IndexError
        self.at += size
        return text

    def list_head(self) -> tuple[int, int]:
        """Kind and number of the elements."""
        head = self.byte()
        count = self.varint() if head >> 4 == 15 else head >> 4
        self.refuse_beyond(count)
        return head & 15, count

    def refuse_beyond(self, count: int) -> None:
        """Raises IndexError where so many values cannot follow: each takes a byte at least."""
        if count > len(self.raw) - self.at:
            raise IndexError

    def structs(self, kind: int) -> Iterator[None]:
        """Once for each struct of a list, which the caller then reads."""
        inner, count = self.list_head()
        if kind != _LIST or (count and inner != _STRUCT):
            raise TypeError
        yield from [None] * count


def _number(footer: _Thrift, kind: int) -> int:
    if kind not in _INTEGERS:
        raise TypeError
    return footer.integer()


def _path(footer: _Thrift, kind: int) -> str:
    inner, count = footer.list_head()
    if kind != _LIST or inner != _BINARY:
        raise TypeError
    return ".".join([footer.text().decode() for _ in range(count)])


_OF_CHUNK = {3: _path, 5: _number, 6: _number, 7: _number, 9: _number, 11: _number}


def _facts(footer: _Thrift, kind: int) -> Chunk:
    if kind != _STRUCT:
        raise TypeError
    fields = footer.struct(_OF_CHUNK)
    if min(fields[5], fields[6], fields[7], fields[9]) < 0:
        raise DocumentError("has columns of less than no bytes")
    dictionary = fields.get(11, 0)
    start = dictionary if 0 < dictionary < fields[9] else fields[9]
    return Chunk(fields[3], fields[5], fields[6], fields[7], start)


def _chunks(footer: _Thrift, kind: int) -> tuple[Chunk, ...]:
    chunks = []
    for _ in footer.structs(kind):
        footer.left -= 1
        if footer.left < 0:
            raise DocumentError(f"has more than {PARQUET_CHUNKS:,} columns in all row groups")
        chunks.append(footer.struct({3: _facts})[3])
    return tuple(chunks)


def _groups(footer: _Thrift, kind: int) -> tuple[RowGroup, ...]:
    groups = []
    for _ in footer.structs(kind):
        group = footer.struct({1: _chunks, 3: _number})
        groups.append(RowGroup(group[3], group[1]))
    return tuple(groups)


def _inner(footer: _Thrift, kind: int) -> dict[int, int]:
    """Numbers and encoding of a page, in a struct of its kind."""
    if kind != _STRUCT:
        raise TypeError
    return footer.struct({1: _number, 2: _number})


def _inner_2(footer: _Thrift, kind: int) -> dict[int, int]:
    if kind != _STRUCT:
        raise TypeError
    return footer.struct({1: _number, 4: _number})


_OF_PAGE = {1: _number, 2: _number, 3: _number, 5: _inner, 7: _inner, 8: _inner_2}
