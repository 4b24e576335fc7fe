"""One array, of one router or of all; its key is the file name without ``.npy``."""

from __future__ import annotations

from pathlib import Path

from moegeom.core.files import open_regular
from moegeom.core.tokens import TokenSource
from moegeom.tokens.foreign.arrays import (
    assign_layers,
    assign_routers,
    foreign_source,
    foreign_tensor,
    is_stack,
)
from moegeom.tokens.foreign.npy import read_npy_header
from moegeom.tokens.rows import FileRows
from moegeom.tokens.source import Request, Source


def recognises(path: Path) -> bool:
    """True for files named ``*.npy``."""
    return path.suffix == ".npy" and path.is_file()


def open_source(path: Path, request: Request) -> TokenSource:
    """The array, read range by range."""
    tensor = foreign_tensor(path, request)
    if not is_stack((path.stem,), request):
        assign_routers(path, (path.stem,), request)
    with open_regular(path, follows=True) as stream:
        header = read_npy_header(
            stream,
            path.stat().st_size,
            path.name,
            tuple(tensor.dtypes.values()),
            may_stack=is_stack((path.stem,), request),
        )
    starts = (header.data_start + layer * header.layer_bytes for layer in range(header.layers))
    layers = [FileRows(path, s, header.dtype, header.num_rows, (header.width,)) for s in starts]
    return foreign_source(
        path, request, tensor, assign_layers(path, path.stem, layers, request), {}
    )


SOURCE = Source("npy", recognises, open_source, needs_stage=True)
