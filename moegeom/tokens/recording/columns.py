"""The token columns of a recording: document, position, token id and domain in Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from moegeom.core.parquet import write_table
from moegeom.core.tokens import TokenColumns

#: One row group is decoded at a time: 18 bytes a token, 1.2 MB.
ROW_GROUP_TOKENS = 65536

#: The columns beside ``token``, as they are in memory.
DTYPES: dict[str, np.dtype] = {
    "document": np.dtype(np.int64),
    "position": np.dtype(np.int32),
    "token_id": np.dtype(np.int32),
    "domain": np.dtype(np.int16),
}


class ColumnSource(Protocol):
    """Anything that has token columns for ranges of tokens."""

    def read(self, start: int, stop: int) -> TokenColumns: ...


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
