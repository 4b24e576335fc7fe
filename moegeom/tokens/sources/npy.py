"""One array for one router; its key is the file name without ``.npy``."""

from __future__ import annotations

from pathlib import Path

from moegeom.core.tokens import TokenSource
from moegeom.tokens.foreign import assign_routers, foreign_source, foreign_tensor
from moegeom.tokens.npy import read_npy_header
from moegeom.tokens.rows import FileRows
from moegeom.tokens.source import Request, Source


def recognises(path: Path) -> bool:
    """True for files named ``*.npy``."""
    return path.suffix == ".npy" and path.is_file()


def open_source(path: Path, request: Request) -> TokenSource:
    """The array, read range by range."""
    tensor = foreign_tensor(path, request)
    (router,) = assign_routers(path, (path.stem,), request)
    with path.open("rb") as stream:
        header = read_npy_header(
            stream, path.stat().st_size, path.name, tuple(tensor.dtypes.values())
        )
    rows = FileRows(path, header.data_start, header.dtype, header.num_rows, (header.width,))
    return foreign_source(path, request, tensor, {router: rows}, {})


SOURCE = Source("npy", recognises, open_source, needs_stage=True)
