"""Parquet files of others: what they hold and what they inflate to, before any of it is decoded.

Arrow's own objects for a column of a row group end the process where a footer contradicts itself:
nothing in Python can catch that. And it makes room for whatever the header of a page asks, without
a look at the footer. So the few facts that are needed are read of their Thrift (compact protocol)
here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from moegeom.core.documents import DocumentError
from moegeom.core.errors import first_line
from moegeom.core.files import open_regular
from moegeom.core.limits import (
    PARQUET_CHUNKS,
    PARQUET_FREE_BYTES,
    PARQUET_GROUPS,
    PARQUET_HEADER_BYTES,
    PARQUET_PAGES,
    PARQUET_TEXT_BYTES,
    PARQUET_VALUES,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


# ------------------------------------------------------------------------------ footers and headers
#: Structs in structs; a footer has six.
_DEEPEST = 30

#: Bytes behind a column that writers of old did not count, and that Arrow reads.
_PADDING = 100

_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_2 = 0, 2, 3

#: Texts as what they have in common with the one before: a page of a megabyte can mean any size.
_DELTA_BYTE_ARRAY = 7


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
        groups = _Thrift(raw).struct(_OF_FOOTER).get(4, [])
        if sum(len(group[1]) for group in groups) > PARQUET_CHUNKS:
            raise _too_many_columns()
        return tuple(
            RowGroup(group[3], tuple(_chunk(column[3]) for column in group[1])) for group in groups
        )
    except (LookupError, TypeError, ValueError) as error:
        if isinstance(error, DocumentError):
            raise
        raise DocumentError("has a damaged footer") from None


def _too_many_columns() -> DocumentError:
    return DocumentError(f"has more than {PARQUET_CHUNKS:,} columns in all row groups")


def _chunk(facts: Mapping[int, Any]) -> Chunk:
    path, dictionary = b".".join(facts[3]).decode(), facts.get(11, 0)
    if min(facts[5], facts[6], facts[7], facts[9]) < 0:
        raise DocumentError("has columns of less than no bytes")
    start = dictionary if 0 < dictionary < facts[9] else facts[9]
    return Chunk(path, facts[5], facts[6], facts[7], start)


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
        # numbers, null ones among them, and their encoding; 0 of an index
        place, encoded = _NUMBERS_OF.get(kind, (None, 0))
        numbers, encoding = (page[place][1], page[place][encoded]) if place else (0, 0)
        smallest = min(inflated, stored, numbers)
    except (LookupError, TypeError):
        raise DocumentError("has a damaged header of a page") from None
    if smallest < 0:
        raise DocumentError("has pages of less than no bytes")
    if encoding == _DELTA_BYTE_ARRAY:
        raise DocumentError("has texts that are stored as differences; they are not read")
    return kind, inflated, numbers, header.at + stored


#: What is kept of a value: fields of structs by number, or of each struct of a list; None for a
#: value without fields.
_Fields = Mapping[int, "_Fields | None"]

_OF_COLUMN: _Fields = {3: None, 5: None, 6: None, 7: None, 9: None, 11: None}
_OF_FOOTER: _Fields = {4: {1: {3: _OF_COLUMN}, 3: None}}
_OF_PAGE: _Fields = {
    1: None, 2: None, 3: None, 5: {1: None, 2: None}, 7: {1: None, 2: None}, 8: {1: None, 4: None}
}  # fmt: skip

#: By kind of page: where in its header the number of its numbers and their encoding stand.
_NUMBERS_OF = {_DATA_PAGE: (5, 2), _DICTIONARY_PAGE: (7, 2), _DATA_PAGE_2: (8, 4)}

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12

#: Integers of 16, 32 and 64 bits, all written in the same way.
_SHORT, _LONG = 4, 6


class _Thrift:
    """A cursor in the bytes of a footer or a header. What is damaged is a LookupError."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0
        self.left, self.left_kept = PARQUET_VALUES, 2 * PARQUET_CHUNKS

    def struct(self, fields: _Fields, depth: int = 0) -> dict[int, Any]:
        """The values of these fields of a struct, by number; others are passed over."""
        values: dict[int, Any] = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.integer()
            if number in fields:
                values[number] = self.value(head & 15, fields[number] or {}, depth)
            else:
                self.value(head & 15, {}, depth)
        return values

    def value(self, kind: int, fields: _Fields, depth: int, is_field: bool = True) -> Any:
        """A number, a text, a list or a struct; None for what no column or page has."""
        self.left -= 1
        if depth > _DEEPEST or self.left < 0:
            raise DocumentError("has a footer that is nested too deeply, or of too many values")
        if _SHORT <= kind <= _LONG:
            return self.integer()
        if kind == _STRUCT:
            return self.struct(fields, depth + 1)
        if kind in (_LIST, _SET):
            head = self.byte()
            count = self.varint() if head >> 4 == 15 else head >> 4
            self.refuse_beyond(count)  # each takes a byte at least
            self.left_kept -= count if fields else 0
            if self.left_kept < 0:
                raise _too_many_columns()
            return [self.value(head & 15, fields, depth + 1, is_field=False) for _ in range(count)]
        if kind not in (_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY):
            raise LookupError
        is_in_head = is_field and kind in (_TRUE, _FALSE)  # a field has its truth there
        size = self.varint() if kind == _BINARY else 8 if kind == _DOUBLE else int(not is_in_head)
        self.refuse_beyond(size)
        self.at += size
        return self.raw[self.at - size : self.at] if kind == _BINARY else None

    def byte(self) -> int:
        self.at += 1
        return self.raw[self.at - 1]

    def varint(self) -> int:
        part = number = self.raw[self.at]
        self.at += 1
        shift = 0
        while part > 127:
            number &= ~(128 << shift)
            shift += 7
            if shift > 63:
                raise LookupError
            part = self.byte()
            number |= part << shift
        return number

    def integer(self) -> int:
        zigzag = self.varint()
        return (zigzag >> 1) ^ -(zigzag & 1)

    def refuse_beyond(self, size: int) -> None:
        """Raises IndexError where so many bytes cannot follow."""
        if size > len(self.raw) - self.at:
            raise IndexError


# -------------------------------------------------------------------------------------------- files
@dataclass(frozen=True)
class ParquetFacts:
    """What the end of a file says: columns with their types, and rows by group.

    ``footer`` is the same as Arrow holds it, so that it is parsed once and not for each read.
    """

    path: Path
    schema: pa.Schema
    groups: tuple[RowGroup, ...]
    footer: pq.FileMetaData

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each row group."""
        return tuple(group.num_rows for group in self.groups)

    @property
    def names(self) -> list[str]:
        """Names of the columns, each once."""
        return self.schema.names

    def inflated(self, names: Collection[str], groups: Sequence[int] | None = None) -> int:
        """Bytes that these columns take decoded, texts as they are stored: once for equal ones."""
        chunks = self._chunks(names, groups)
        return sum(8 * chunk.num_values + chunk.inflated_bytes for chunk in chunks)

    def inflated_by_pages(self, names: Collection[str], groups: Sequence[int] | None = None) -> int:
        """The same by what each page says of itself; DocumentError where one says nothing."""
        with open_regular(self.path, follows=True) as file:
            return most_inflated(file, self._chunks(names, groups))

    def count_values(self) -> int:
        """Numbers and texts of all columns, whatever lists they stand in."""
        return sum(chunk.num_values for group in self.groups for chunk in group.chunks)

    def num_values(self, name: str, group: int) -> int:
        """Numbers of a column in a row group, whatever lists they stand in."""
        return sum(chunk.num_values for chunk in self._chunks((name,), (group,)))

    def leaves(self, names: Collection[str]) -> list[str]:
        """Columns as Parquet calls them, with what lists are made of behind their names."""
        return [chunk.path for chunk in self._chunks(names, range(len(self.groups[:1])))]

    def _chunks(self, names: Collection[str], groups: Sequence[int] | None) -> Iterator[Chunk]:
        prefixes = frozenset(f"{name}." for name in names)
        sizes = {len(name) for name in prefixes}
        for group in self.groups if groups is None else (self.groups[n] for n in groups):
            for chunk in group.chunks:
                # a column may have dots in its name, and lists have some behind it
                path = f"{chunk.path}."
                if any(path[:size] in prefixes for size in sizes):
                    yield chunk


def opened(path: Path, mode: str = "rb") -> pa.OSFile:
    """A file for Arrow: it takes a name for a URL, or cannot spell it, where it is not bytes."""
    import pyarrow as pa

    return pa.OSFile(os.fsencode(path), mode)


def write_table(table: pa.Table, path: Path, **options: Any) -> None:
    """Writes the file, whatever its name, with options of Arrow."""
    import pyarrow.parquet as pq

    with opened(path, "wb") as file:
        pq.write_table(table, file, **options)


def parquet_facts(path: Path) -> ParquetFacts:
    """What a file says about itself; nothing is decoded.

    Raises
    ------
    DocumentError
        When it cannot be read, or has two columns of one name.
    FileNotFoundError
        When it is not there.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        groups = read_row_groups(path)  # first: Arrow waits for a pipe where nothing wakes it
        if len(groups) > PARQUET_GROUPS:
            raise DocumentError(f"has {len(groups)} row groups, more than {PARQUET_GROUPS}")
        with opened(path) as source, pq.ParquetFile(source) as file:
            schema, footer = file.schema_arrow, file.metadata
            names = schema.names
    except (FileNotFoundError, DocumentError):
        raise
    except (OSError, pa.ArrowException, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DocumentError(f"cannot be read ({reason})") from None
    twice = next((name for name, number in Counter(names).items() if number > 1), None)
    if twice is not None:
        raise DocumentError(f"has two columns of the name {twice[:60]!r}")
    if min((group.num_rows for group in groups), default=0) < 0:
        raise DocumentError("has row groups of less than no rows")
    return ParquetFacts(path, schema, groups, footer)


def read_columns(
    facts: ParquetFacts, names: Sequence[str], groups: Sequence[int] | None = None
) -> pa.Table:
    """These columns of all row groups, or of some, decoded.

    Equal texts are decoded once and counted for every row they stand in.

    Raises
    ------
    DocumentError
        When it cannot be read, or takes more than ``PARQUET_FREE_BYTES`` and 64 times the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    most = PARQUET_FREE_BYTES + 64 * facts.path.stat().st_size
    # what the footer says is cheap to know; what the pages say is what Arrow goes by
    for num_bytes in (facts.inflated(names, groups), facts.inflated_by_pages(names, groups)):
        if num_bytes > most:
            raise DocumentError(f"would take {num_bytes:,} bytes of memory, more than {most:,}")
    texts = [name for name in names if _is_text(_leaf(facts.schema.field(name)))]
    numbers = list(range(len(facts.groups)) if groups is None else groups)
    try:
        leaves = facts.leaves(texts)
        with (
            opened(facts.path) as source,
            pq.ParquetFile(source, metadata=facts.footer, read_dictionary=leaves) as file,
        ):
            table = file.read_row_groups(numbers, columns=list(names), use_threads=False)
        table.validate(full=True)
        for name in texts:
            _refuse_repeats(table.column(name))
        fields = [_plain(facts.schema.field(name)) for name in names]
        columns = [table.column(field.name).cast(field.type) for field in fields]
        return pa.table(columns, pa.schema(fields, facts.schema.metadata))
    except DocumentError:
        raise
    except (OSError, pa.ArrowException, ValueError, LookupError) as error:
        raise DocumentError(f"cannot be read ({first_line(error)})") from None


def _leaf(field: pa.Field) -> pa.DataType:
    """What a column holds, alone or in lists; anything else inflates without a bound."""
    import pyarrow as pa

    kind = field.type
    if _is_list(kind):
        kind = kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    predicates = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, _is_text)
    if not any(is_known(kind) for is_known in predicates):
        raise DocumentError(
            f"column '{field.name:.60}' is {field.type!s:.60}; expected numbers or texts"
        )
    return kind


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    is_short = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_short or pa.types.is_large_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _plain(field: pa.Field) -> pa.Field:
    """The field with texts spelled out, its metadata kept."""
    import pyarrow as pa

    if not _is_text(_leaf(field)):
        return field
    return field.with_type(pa.list_(pa.string()) if _is_list(field.type) else pa.string())


def _refuse_repeats(column: pa.ChunkedArray) -> None:
    """Raises DocumentError where texts of a dictionary would take too much spelled out."""
    import pyarrow as pa

    for chunk in column.chunks:
        flat = chunk.flatten() if _is_list(column.type) else chunk
        if not pa.types.is_dictionary(flat.type):
            continue
        longest = max((len(text) for text in flat.dictionary.to_pylist() if text), default=0)
        if longest * len(flat) > PARQUET_TEXT_BYTES:
            raise DocumentError(
                f"repeats a text of {longest:,} characters in {len(flat):,} rows, more than is read"
            )
