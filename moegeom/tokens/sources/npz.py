"""One array per router, or one of all, as ``np.savez`` writes them.

Uncompressed members are read range by range where they lie in the archive. Compressed ones
(``np.savez_compressed``) cannot be: they are held in memory, up to a limit.
"""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import cast

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.limits import NPZ_HELD_BYTES
from moegeom.core.tokens import TokenSource
from moegeom.tokens.foreign.arrays import (
    COLUMN_DTYPES,
    COLUMN_KEYS,
    assign_layers,
    assign_routers,
    foreign_source,
    foreign_tensor,
    is_stack,
)
from moegeom.tokens.foreign.npy import NpyHeader, read_npy_header
from moegeom.tokens.foreign.npy_arrays import data_start, npz_members
from moegeom.tokens.rows import ArrayRows, FileRows, Rows
from moegeom.tokens.source import Request, Source


def recognises(path: Path) -> bool:
    """True for files named ``*.npz``."""
    return path.suffix == ".npz" and path.is_file()


def open_source(path: Path, request: Request) -> TokenSource:
    """The arrays, assigned to routers."""
    tensor = foreign_tensor(path, request)
    with npz_members(path) as (archive, infos):
        members = {info.filename.removesuffix(".npy"): info for info in infos}
        if len(members) < len(infos):
            raise RecordingError(f"{path.name}: two arrays have the same name.")
        keys = [key for key in members if key not in COLUMN_KEYS]
        reader = _Members(path, archive)
        dtypes = tuple(tensor.dtypes.values())
        if is_stack(keys, request):
            layers = reader.layers(members[keys[0]], dtypes, may_stack=True)
            rows = assign_layers(path, keys[0], layers, request)
        else:
            routers = assign_routers(path, keys, request)
            rows = {r: reader.rows(members[key], dtypes, False) for r, key in routers.items()}
        columns = {
            name: reader.rows(members[name], COLUMN_DTYPES, True)
            for name in COLUMN_KEYS
            if name in members
        }
    return foreign_source(path, request, tensor, rows, columns)


class _Members:
    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path = path
        self._archive = archive
        self._most = self._bytes_left = NPZ_HELD_BYTES + 4 * path.stat().st_size

    def rows(self, info: zipfile.ZipInfo, allowed: Collection[np.dtype], is_column: bool) -> Rows:
        (only,) = self.layers(info, allowed, is_column)
        return only

    def layers(
        self,
        info: zipfile.ZipInfo,
        allowed: Collection[np.dtype],
        is_column: bool = False,
        may_stack: bool = False,
    ) -> Sequence[Rows]:
        where = f"{self._path.name}: {info.filename}"
        with self._archive.open(info) as member:
            stream = cast(BufferedIOBase, member)
            header = read_npy_header(stream, info.file_size, where, allowed, is_column, may_stack)
            if info.compress_type == zipfile.ZIP_STORED:
                return self._in_place(info, header, where)
            return self._in_memory(stream, header, where)

    def _in_place(self, info: zipfile.ZipInfo, header: NpyHeader, where: str) -> list[FileRows]:
        offset = data_start(self._path, info) + header.data_start
        if offset + header.size_bytes > self._path.stat().st_size:
            raise RecordingError(f"{where}: the array ends after the file; it is truncated.")
        starts = (offset + layer * header.layer_bytes for layer in range(header.layers))
        return [
            FileRows(self._path, s, header.dtype, header.num_rows, (header.width,)) for s in starts
        ]

    def _in_memory(self, stream: BufferedIOBase, header: NpyHeader, where: str) -> list[ArrayRows]:
        self._bytes_left -= header.size_bytes
        if self._bytes_left < 0:
            raise RecordingError(
                f"{where}: compressed arrays of more than {self._most:,} bytes in all.",
                "Save with np.savez, which does not compress: ranges are then read in place.",
            )
        raw = stream.read(header.size_bytes)
        if len(raw) != header.size_bytes:
            raise RecordingError(
                f"{where}: {len(raw)} bytes of numbers; expected {header.size_bytes}."
            )
        arrays = np.frombuffer(raw, header.dtype)
        arrays = arrays.reshape(header.layers, header.num_rows, header.width)
        return [ArrayRows(array, where) for array in arrays]


SOURCE = Source("npz", recognises, open_source, needs_stage=True)
