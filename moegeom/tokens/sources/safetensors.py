"""One tensor per router in a safetensors file."""

from __future__ import annotations

from pathlib import Path

from moegeom.core.tokens import TokenSource
from moegeom.tokens.foreign.arrays import (
    COLUMN_DTYPES,
    COLUMN_KEYS,
    assign_routers,
    foreign_source,
    foreign_tensor,
)
from moegeom.tokens.foreign.tensor_file import open_tensor_file
from moegeom.tokens.source import Request, Source


def recognises(path: Path) -> bool:
    """True for files named ``*.safetensors``."""
    return path.suffix == ".safetensors" and path.is_file()


def open_source(path: Path, request: Request) -> TokenSource:
    """The tensors, read range by range."""
    tensor = foreign_tensor(path, request)
    file = open_tensor_file(path)
    keys = sorted(key for key in file.names if key not in COLUMN_KEYS)
    routers = assign_routers(path, keys, request)
    dtypes = tuple(tensor.dtypes.values())
    rows = {router: file.rows(key, dtypes) for router, key in routers.items()}
    columns = {key: file.column(key, COLUMN_DTYPES) for key in COLUMN_KEYS if key in file.names}
    return foreign_source(path, request, tensor, rows, columns)


SOURCE = Source("safetensors", recognises, open_source, needs_stage=True)
