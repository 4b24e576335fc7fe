"""List columns of a Parquet file as rows, decoded one row group at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moegeom.core.documents import DocumentError
from moegeom.core.errors import RecordingError, first_line
from moegeom.core.limits import PARQUET_GROUP_BYTES, PARQUET_WIDTH
from moegeom.core.parquet import RowGroup, parquet_facts, read_columns
from moegeom.core.shapes import Shaped
from moegeom.tokens.rows import Cache, assign_rows, shard_ranges

if TYPE_CHECKING:
    import pyarrow as pa

#: Decoded row groups of all columns kept together, so that each is decoded once in a scan that
#: asks for all routers of a few tokens at a time.
CACHE_BYTES = 1 << 30

#: Numbers of all columns up to which neighbouring row groups are decoded together.
_TOGETHER = 1 << 22


class ParquetTable:
    """One file: its columns, and a bounded cache of what was decoded, safe for threads.

    A block is a row group, or neighbours of few numbers: each that is decoded by itself costs a
    millisecond, and a file may have one for every token.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._facts = parquet_facts(path)
        except (DocumentError, OSError) as error:
            raise self._unreadable(error) from None
        self.schema: pa.Schema = self._facts.schema
        self._blocks = _blocks(self._facts.groups)
        sizes = (sum(self._facts.sizes[n] for n in block) for block in self._blocks)
        self.starts: tuple[int, ...] = tuple(accumulate(sizes, initial=0))
        self._cache = Cache[np.ndarray](CACHE_BYTES, lambda block: block.nbytes)
        if not self.starts[-1]:
            raise RecordingError(f"{path.name}: no rows.")

    def rows(self, name: str, allowed: Collection[np.dtype], is_column: bool) -> ParquetRows:
        """A column of lists of one length, or with ``is_column`` of plain numbers, as rows."""
        import pyarrow as pa

        stored = self.schema.field(name).type
        value = stored if is_column else _list_value(stored)
        is_number = pa.types.is_integer(value) or pa.types.is_floating(value)
        if not is_number or value.to_pandas_dtype() not in allowed:
            kind = "" if is_column else "lists of "
            raise RecordingError(
                f"{self.path.name}: column '{name}' is {stored}; "
                f"expected {kind}{', '.join(str(dtype) for dtype in allowed)}."
            )
        return ParquetRows(self, name, self.starts[-1], 1 if is_column else self._width(name))

    def _width(self, name: str) -> int:
        """Numbers of each list, from the counts at the end of the file: nothing is decoded."""
        first = next(n for n, size in enumerate(self._facts.sizes) if size)
        values, rows = self._facts.num_values(name, first), self._facts.sizes[first]
        if values % rows or not values:
            raise RecordingError(
                f"{self.path.name}: column '{name}' has {values} numbers in {rows} lists; "
                "expected equally many for every token."
            )
        if values // rows > PARQUET_WIDTH:
            raise RecordingError(
                f"{self.path.name}: column '{name}' has lists of {values // rows:,} numbers, more "
                f"than {PARQUET_WIDTH:,}."
            )
        return values // rows

    def block(self, name: str, width: int, number: int) -> Shaped[np.ndarray, "rows width"]:
        """One block of one column; threads that want the same one decode it once."""
        return self._cache.get((name, number), lambda: self._decode(name, width, number))

    def _decode(self, name: str, width: int, number: int) -> Shaped[np.ndarray, "rows width"]:
        num_rows = self.starts[number + 1] - self.starts[number]
        groups = self._blocks[number]
        if self._facts.inflated([name], groups) > PARQUET_GROUP_BYTES:
            raise RecordingError(
                f"{self.path.name}: row groups of {num_rows} tokens are too large to decode.",
                "Write it with row_group_size=4096.",
            )
        try:
            table = read_columns(self._facts, [name], groups)
        except (DocumentError, OSError) as error:
            raise self._unreadable(error) from None
        flat = _flat(table.column(name).combine_chunks(), width)
        if flat is None or len(flat) != num_rows * width:
            raise RecordingError(
                f"{self.path.name}: column '{name}' has a missing entry or lists of several "
                f"lengths in row groups {groups[0]} to {groups[-1]}; expected {width} numbers for "
                "every token."
            )
        return flat.to_numpy(zero_copy_only=False).reshape(num_rows, width)

    def _unreadable(self, error: Exception) -> RecordingError:
        return RecordingError(f"{self.path.name}: cannot be read ({first_line(error)}).")


def _blocks(groups: Sequence[RowGroup]) -> list[range]:
    """Numbers of row groups that are decoded together."""
    starts, numbers = [0], 0
    for number, group in enumerate(groups):
        own = sum(chunk.num_values for chunk in group.chunks)
        if numbers and numbers + own > _TOGETHER:
            starts.append(number)
            numbers = 0
        numbers += own
    return [range(*ends) for ends in pairwise([*starts, len(groups)])]


def _list_value(stored: pa.DataType) -> pa.DataType:
    """Type of the numbers in lists; null for a type that is no list."""
    import pyarrow as pa

    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return stored.value_type if any(is_kind(stored) for is_kind in kinds) else pa.null()


def _flat(column: pa.Array, width: int) -> pa.Array | None:
    """All numbers in order; None when any is missing or a list has another length."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.null_count:
        return None
    if not pa.types.is_null(_list_value(column.type)):
        lengths = pc.call_function("list_value_length", [column]).to_numpy()
        if (lengths != width).any():
            return None
        column = column.flatten()
    return None if column.null_count else column


@dataclass(frozen=True)
class ParquetRows:
    """One column of a ``ParquetTable``."""

    table: ParquetTable
    name: str
    num_rows: int
    width: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)  # lists are decoded, never copied as they are

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (self.width,)

    def read_into(self, start: int, out: Shaped[np.ndarray, "rows width"]) -> None:
        where = f"{self.table.path.name}: column '{self.name}'"
        for block, first, last in shard_ranges(self.table.starts, start, start + len(out)):
            to = self.table.starts[block] + first - start
            stored = self.table.block(self.name, self.width, block)[first:last]
            assign_rows(out[to : to + last - first], stored, where)
