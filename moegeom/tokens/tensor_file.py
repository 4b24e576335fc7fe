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

    def rows(self, name: str, allowed: Collection[np.dtype]) -> FileRows:
        """A two-dimensional tensor, known to lie inside the file and to have an allowed dtype."""
        return self._place(name, allowed, 2)

    def column(self, name: str, allowed: Collection[np.dtype]) -> FileRows:
        """A one-dimensional tensor, as rows one wide."""
        return self._place(name, allowed, 1)

    def _place(self, name: str, allowed: Collection[np.dtype], dimensions: int) -> FileRows:
        info = self._info(name)
        stored = DTYPES.get(info.dtype)
        if stored is None or stored.numpy is None or stored.numpy not in allowed:
            raise RecordingError(
                f"{self.path.name}: tensor '{name}' is {info.dtype}; "
                f"expected {' or '.join(str(dtype) for dtype in allowed)}."
            )
        if len(info.shape) != dimensions or 0 in info.shape:
            raise RecordingError(
                f"{self.path.name}: tensor '{name}' has shape {info.shape}; "
                f"expected {'(tokens, width)' if dimensions == 2 else '(tokens,)'}."
            )
        width = info.shape[1] if dimensions == 2 else 1
        return FileRows(self.path, info.offset, stored.numpy, info.shape[0], width)

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
