"""One row per token and one list column per router, each list as long as the width.

Integer columns ``document``, ``position`` and ``token_id`` are facts about the tokens.
"""

from __future__ import annotations

from pathlib import Path

from moegeom.core.errors import RecordingError
from moegeom.core.tokens import TokenSource
from moegeom.tokens.foreign.arrays import (
    COLUMN_DTYPES,
    COLUMN_KEYS,
    assign_routers,
    foreign_source,
    foreign_tensor,
)
from moegeom.tokens.foreign.parquet_rows import ParquetTable
from moegeom.tokens.source import Request, Source


def recognises(path: Path) -> bool:
    """True for files named ``*.parquet``."""
    return path.suffix == ".parquet" and path.is_file()


def open_source(path: Path, request: Request) -> TokenSource:
    """The list columns, assigned to routers."""
    tensor = foreign_tensor(path, request)
    table = ParquetTable(path)
    names = table.schema.names
    if len(set(names)) < len(names):
        raise RecordingError(f"{path.name}: two columns have the same name.")
    keys = [name for name in names if name not in COLUMN_KEYS]
    routers = assign_routers(path, keys, request)
    dtypes = tuple(tensor.dtypes.values())
    rows = {router: table.rows(key, dtypes, False) for router, key in routers.items()}
    columns = {key: table.rows(key, COLUMN_DTYPES, True) for key in COLUMN_KEYS if key in names}
    return foreign_source(path, request, tensor, rows, columns)


SOURCE = Source("parquet", recognises, open_source, needs_stage=True)
