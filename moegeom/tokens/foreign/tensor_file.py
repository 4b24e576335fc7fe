"""The tensors of a safetensors file as rows on disk; reads the header and nothing else."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moegeom.checkpoint.dtypes import DTYPES
from moegeom.checkpoint.formats.safetensors import SafetensorsFile
from moegeom.checkpoint.reading import CountingFile, ReadLog
from moegeom.checkpoint.store import TensorInfo
from moegeom.core.errors import CheckpointError, RecordingError
from moegeom.tokens.foreign.npy import flattening
from moegeom.tokens.rows import FileRows


@dataclass(frozen=True)
class TensorFile:
    """One open safetensors file."""

    path: Path
    file: SafetensorsFile

    @property
    def names(self) -> Collection[str]:
        """The tensors in it."""
        return self.file.names()

    def rows(
        self, name: str, allowed: Collection[np.dtype], row: tuple[str, ...] = ("width",)
    ) -> FileRows:
        """A tensor known to lie inside the file and to have an allowed dtype.

        ``row`` names its dimensions after the first, which is tokens.
        """
        return self._place(name, allowed, row)

    def column(self, name: str, allowed: Collection[np.dtype]) -> FileRows:
        """A one-dimensional tensor, as rows one wide."""
        return self._place(name, allowed, ())

    def _place(self, name: str, allowed: Collection[np.dtype], row: tuple[str, ...]) -> FileRows:
        info = self._info(name)
        stored = DTYPES.get(info.dtype)
        if stored is None or stored.numpy is None or stored.numpy not in allowed:
            raise RecordingError(
                f"{self.path.name}: tensor '{name}' is {info.dtype}; "
                f"expected {' or '.join(str(dtype) for dtype in allowed)}."
            )
        if len(info.shape) != 1 + len(row) or 0 in info.shape:
            raise RecordingError(
                f"{self.path.name}: tensor '{name}' has shape {info.shape}; "
                f"expected ({', '.join(('tokens', *row))}).",
                flattening("array", len(info.shape)) if row == ("width",) else "",
            )
        num_rows, *row_shape = info.shape
        return FileRows(self.path, info.offset, stored.numpy, num_rows, tuple(row_shape or (1,)))

    def _info(self, name: str) -> TensorInfo:
        try:
            return self.file.info(name)
        except CheckpointError as error:
            raise RecordingError(error.message, error.hint) from None


def open_tensor_file(path: Path) -> TensorFile:
    """The file, its header parsed and its length checked against the header."""
    if not path.exists():
        raise RecordingError(f"{path.name} is missing.", "Copy the whole recording.")
    opened = SafetensorsFile(CountingFile(path, path.name, ReadLog()))
    try:
        opened.names()
    except CheckpointError as error:
        raise RecordingError(error.message, error.hint) from None
    return TensorFile(path, opened)
