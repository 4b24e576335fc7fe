"""The token columns of a recording: document, position, token id and domain in Parquet."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moegeom.core.documents import DocumentError
from moegeom.core.errors import RecordingError, first_line
from moegeom.core.limits import RECORDING_GROUP_TOKENS
from moegeom.core.parquet import ParquetFacts, parquet_facts, read_columns, write_table
from moegeom.core.text import MOST_QUOTED, number_of
from moegeom.core.tokens import TokenColumns
from moegeom.tokens.rows import Cache, shard_ranges

if TYPE_CHECKING:
    import pyarrow as pa

#: One row group is decoded at a time: 18 bytes a token, 1.2 MB.
ROW_GROUP_TOKENS = 65536

#: The columns beside ``token``, as they are in memory.
DTYPES: dict[str, np.dtype] = {
    "document": np.dtype(np.int64),
    "position": np.dtype(np.int32),
    "token_id": np.dtype(np.int32),
    "domain": np.dtype(np.int16),
}


def unknown_columns(num_tokens: int) -> TokenColumns:
    """Columns that say nothing: -1 everywhere."""
    return TokenColumns(**{name: np.full(num_tokens, -1, dt) for name, dt in DTYPES.items()})


class UnknownColumns:
    """The columns of a source that has none."""

    def read(self, start: int, stop: int) -> TokenColumns:
        """-1 everywhere."""
        return unknown_columns(stop - start)


def write_columns(
    path: Path, first_token: int, columns: TokenColumns, domains: tuple[str, ...]
) -> None:
    """Write one shard; ``domain`` is stored as text, missing where unknown."""
    import pyarrow as pa

    has_domain = columns.domain >= 0
    number = pa.array(np.where(has_domain, columns.domain, 0), pa.int32(), mask=~has_domain)
    domain = pa.DictionaryArray.from_arrays(number, pa.array(domains or ("",), pa.string()))
    table = pa.table(
        {
            "token": pa.array(np.arange(first_token, first_token + len(columns.document))),
            "document": pa.array(columns.document, pa.int64()),
            "position": pa.array(columns.position, pa.int32()),
            "token_id": pa.array(columns.token_id, pa.int32()),
            "domain": domain.cast(pa.string()),
        }
    )
    write_table(table, path, row_group_size=ROW_GROUP_TOKENS, compression="zstd")


#: Decoded row groups in memory, so that a scan in small steps decodes each once.
CACHED_ROW_GROUPS = 4

#: What is decoded; a file may hold more.
_COLUMNS = ("token", *DTYPES)

#: No domain of the recording; -1 is null.
_UNLISTED = -2


class ParquetColumns:
    """The token columns of all shards, decoded one row group at a time.

    Safe for several reader threads: a row group is decoded from a file opened for it.
    """

    def __init__(self, paths: tuple[Path, ...], sizes: tuple[int, ...], domains: tuple[str, ...]):
        self._domains = {name: number for number, name in enumerate(domains)}
        self._groups: list[tuple[ParquetFacts, int]] = []
        self._starts: tuple[int, ...] = (0,)
        for path, size in zip(paths, sizes, strict=True):
            self._add(path, size)
        self._cache = Cache[TokenColumns](CACHED_ROW_GROUPS, lambda _: 1)

    def _add(self, path: Path, expected: int) -> None:
        facts = _facts(path)
        rows = facts.sizes
        if sum(rows) != expected or max(rows, default=0) > RECORDING_GROUP_TOKENS:
            raise RecordingError(
                f"{path.name}: {number_of(sum(rows), 'token')} in row groups of up to "
                f"{max(rows, default=0)}; expected {number_of(expected, 'token')} in row groups of "
                f"up to {RECORDING_GROUP_TOKENS}."
            )
        self._groups += [(facts, number) for number in range(len(rows))]
        self._starts = self._starts[:-1] + tuple(accumulate(rows, initial=self._starts[-1]))

    def read(self, start: int, stop: int) -> TokenColumns:
        """Columns of tokens ``[start, stop)``."""
        out = {name: np.empty(stop - start, dtype) for name, dtype in DTYPES.items()}
        for group, first, last in shard_ranges(self._starts, start, stop):
            columns = self._cache.get(group, partial(self._decode, group))
            to = self._starts[group] + first - start
            for name, array in out.items():
                array[to : to + last - first] = getattr(columns, name)[first:last]
        return TokenColumns(**out)

    def _decode(self, group: int) -> TokenColumns:
        (facts, number), first = self._groups[group], self._starts[group]
        try:
            table = read_columns(facts, _COLUMNS, [number])
        except (DocumentError, OSError) as error:
            raise _unreadable(facts.path, error) from None
        token = _numbers(table, "token", np.dtype(np.int64), facts.path)
        if not np.array_equal(token, np.arange(first, first + len(token))):
            raise RecordingError(
                f"{facts.path.name}: column 'token' does not count from {first}; "
                "the shard belongs elsewhere."
            )
        plain = ("document", "position", "token_id")
        numbers = {name: _numbers(table, name, DTYPES[name], facts.path) for name in plain}
        return TokenColumns(**numbers, domain=self._domain_numbers(table, facts.path))

    def _domain_numbers(self, table: pa.Table, path: Path) -> np.ndarray:
        domain = table.column("domain").combine_chunks().dictionary_encode()
        names = domain.dictionary.to_pylist()
        # One entry more than names, for null.
        numbers = np.array([*(self._domains.get(name, _UNLISTED) for name in names), -1], np.int16)
        domains = numbers[domain.indices.fill_null(len(names)).to_numpy(zero_copy_only=False)]
        if (domains == _UNLISTED).any():
            unlisted = [name for name in names if name not in self._domains]
            raise RecordingError(
                f"{path.name}: domain {unlisted[0]!r:.60} is not listed in recording.json "
                f"({', '.join(self._domains)[:MOST_QUOTED] or 'none'})."
            )
        return domains


def _facts(path: Path) -> ParquetFacts:
    """What the file says about itself: the columns of a recording, of the types that it has."""
    import pyarrow as pa

    try:
        facts = parquet_facts(path)
    except FileNotFoundError:
        raise RecordingError(f"{path.name} is missing.", "Copy the whole recording.") from None
    except DocumentError as error:
        raise _unreadable(path, error) from None
    missing = {*_COLUMNS} - {*facts.names}
    if missing:
        raise RecordingError(f"{path.name}: no column {', '.join(sorted(missing))}.")
    for name in _COLUMNS:
        kind = facts.schema.field(name).type
        is_known = pa.types.is_string if name == "domain" else pa.types.is_integer
        if not is_known(kind):
            expected = "text" if name == "domain" else "integers"
            raise RecordingError(
                f"{path.name}: column '{name}' is {kind!s:.60}; expected {expected}."
            )
    return facts


def _numbers(table: pa.Table, name: str, dtype: np.dtype, path: Path) -> np.ndarray:
    import pyarrow as pa

    try:
        column = table.column(name).fill_null(-1).cast(pa.from_numpy_dtype(dtype))
    except (pa.ArrowException, OverflowError) as error:
        raise _unreadable(path, error) from None
    return column.to_numpy()


def _unreadable(path: Path, error: Exception) -> RecordingError:
    return RecordingError(f"{path.name}: cannot be read ({first_line(error)}).", "Copy it again.")
