"""One array per router, as ``np.savez`` writes them.

Uncompressed members are read range by range where they lie in the archive. Compressed ones
(``np.savez_compressed``) cannot be: they are held in memory, up to a limit.
"""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from io import BufferedIOBase
from pathlib import Path
from typing import cast

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.tokens import TokenSource
from moegeom.tokens.foreign import (
    COLUMN_DTYPES,
    COLUMN_KEYS,
    assign_routers,
    foreign_source,
    foreign_tensor,
)
from moegeom.tokens.npy import NpyHeader, read_npy_header
from moegeom.tokens.rows import ArrayRows, FileRows, Rows
from moegeom.tokens.source import Request, Source

#: Of all compressed arrays of one file together.
MAX_IN_MEMORY_BYTES = 4 << 30

#: A local file header before its two variable fields, whose lengths end it (APPNOTE 4.3.7).
_LOCAL_HEADER_BYTES = 30

_IS_ENCRYPTED = 0x1


def recognises(path: Path) -> bool:
    """True for files named ``*.npz``."""
    return path.suffix == ".npz" and path.is_file()


def open_source(path: Path, request: Request) -> TokenSource:
    """The arrays, assigned to routers."""
    tensor = foreign_tensor(path, request)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            keys = [key for key in members if key not in COLUMN_KEYS]
            routers = assign_routers(path, keys, request)
            reader = _Members(path, archive)
            dtypes = tuple(tensor.dtypes.values())
            rows = {r: reader.rows(members[key], dtypes, False) for r, key in routers.items()}
            columns = {
                name: reader.rows(members[name], COLUMN_DTYPES, True)
                for name in COLUMN_KEYS
                if name in members
            }
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as error:
        raise RecordingError(f"{path.name}: not a readable npz file ({error}).") from None
    return foreign_source(path, request, tensor, rows, columns)


class _Members:
    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path = path
        self._archive = archive
        self._bytes_left = MAX_IN_MEMORY_BYTES

    def rows(self, info: zipfile.ZipInfo, allowed: Collection[np.dtype], is_column: bool) -> Rows:
        where = f"{self._path.name}: {info.filename}"
        with self._archive.open(info) as member:
            stream = cast(BufferedIOBase, member)
            header = read_npy_header(stream, info.file_size, where, allowed, is_column)
            if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & _IS_ENCRYPTED:
                return self._in_place(info, header, where)
            return self._in_memory(stream, header, where)

    def _in_place(self, info: zipfile.ZipInfo, header: NpyHeader, where: str) -> FileRows:
        with self._path.open("rb") as file:
            file.seek(info.header_offset)
            local = file.read(_LOCAL_HEADER_BYTES)
            size = file.seek(0, 2)
        variable = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        offset = info.header_offset + _LOCAL_HEADER_BYTES + variable + header.data_start
        if offset + header.size_bytes > size:
            raise RecordingError(f"{where}: the array ends after the file; it is truncated.")
        return FileRows(self._path, offset, header.dtype, header.num_rows, (header.width,))

    def _in_memory(self, stream: BufferedIOBase, header: NpyHeader, where: str) -> ArrayRows:
        self._bytes_left -= header.size_bytes
        if self._bytes_left < 0:
            raise RecordingError(
                f"{where}: compressed arrays of more than {MAX_IN_MEMORY_BYTES >> 30} GiB.",
                "Save with np.savez, which does not compress: ranges are then read in place.",
            )
        raw = stream.read(header.size_bytes)
        if len(raw) != header.size_bytes:
            raise RecordingError(
                f"{where}: {len(raw)} bytes of numbers; expected {header.size_bytes}."
            )
        array = np.frombuffer(raw, header.dtype).reshape(header.num_rows, header.width)
        return ArrayRows(array, where)


SOURCE = Source("npz", recognises, open_source, needs_stage=True)
