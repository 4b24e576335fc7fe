"""Parquet files of others: what they hold and what they inflate to, before any of it is decoded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegeom.core.documents import DocumentError
from moegeom.core.errors import first_line
from moegeom.core.files import open_regular
from moegeom.core.limits import PARQUET_FREE_BYTES, PARQUET_GROUPS, PARQUET_TEXT_BYTES
from moegeom.core.parquet_footer import Chunk, RowGroup, most_inflated, read_row_groups

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


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
        numbers = range(len(self.groups)) if groups is None else groups
        return sum(
            8 * chunk.num_values + chunk.inflated_bytes
            for number in numbers
            for chunk in self._chunks(names, number)
        )

    def inflated_by_pages(self, names: Collection[str], groups: Sequence[int] | None = None) -> int:
        """The same by what each page says of itself; DocumentError where one says nothing."""
        numbers = range(len(self.groups)) if groups is None else groups
        with open_regular(self.path, follows=True) as file:
            return most_inflated(file, (c for n in numbers for c in self._chunks(names, n)))

    def count_values(self) -> int:
        """Numbers and texts of all columns, whatever lists they stand in."""
        return sum(chunk.num_values for group in self.groups for chunk in group.chunks)

    def num_values(self, name: str, group: int) -> int:
        """Numbers of a column in a row group, whatever lists they stand in."""
        return sum(chunk.num_values for chunk in self._chunks((name,), group))

    def leaves(self, names: Collection[str]) -> list[str]:
        """Columns as Parquet calls them, with what lists are made of behind their names."""
        if not self.groups:
            return []
        return [chunk.path for chunk in self._chunks(names, 0)]

    def _chunks(self, names: Collection[str], number: int) -> Iterator[Chunk]:
        prefixes = frozenset(f"{name}." for name in names)
        sizes = {len(name) for name in prefixes}
        for chunk in self.groups[number].chunks:
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
    except FileNotFoundError:
        raise
    except DocumentError:
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
        columns = [
            _spelled_out(table.column(name)) if name in texts else table.column(name)
            for name in names
        ]
        fields = [_plain(facts.schema.field(name)) for name in names]
        return pa.table(columns, pa.schema(fields, facts.schema.metadata))
    except DocumentError:
        raise
    except (OSError, pa.ArrowException, ValueError, LookupError) as error:
        raise DocumentError(f"cannot be read ({first_line(error)})") from None


def _leaf(field: pa.Field) -> pa.DataType:
    """What a column holds, alone or in lists; anything else inflates without a bound."""
    import pyarrow as pa

    kind = field.type
    if any(is_list(kind) for is_list in _lists()):
        kind = kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    predicates = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, _is_text)
    if not any(is_known(kind) for is_known in predicates):
        raise DocumentError(
            f"column '{field.name:.60}' is {field.type!s:.60}; expected numbers or texts"
        )
    return kind


def _lists() -> tuple[Callable[[pa.DataType], bool], ...]:
    import pyarrow as pa

    return (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _plain(field: pa.Field) -> pa.Field:
    """The field with texts spelled out, its metadata kept."""
    import pyarrow as pa

    if not _is_text(_leaf(field)):
        return field
    is_list = any(is_list(field.type) for is_list in _lists())
    return field.with_type(pa.list_(pa.string()) if is_list else pa.string())


def _spelled_out(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of dictionaries, or of lists of them, as one of texts."""
    import pyarrow as pa

    is_list = any(is_list(column.type) for is_list in _lists())
    kind = pa.list_(pa.string()) if is_list else pa.string()
    for chunk in column.chunks:
        flat = chunk.flatten() if is_list else chunk
        if not pa.types.is_dictionary(flat.type):
            continue
        longest = max((len(text) for text in flat.dictionary.to_pylist() if text), default=0)
        if longest * len(flat) > PARQUET_TEXT_BYTES:
            raise DocumentError(
                f"repeats a text of {longest:,} characters in {len(flat):,} rows, more than is read"
            )
    return column.cast(kind)
