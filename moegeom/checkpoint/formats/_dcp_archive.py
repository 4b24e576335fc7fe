"""One piece of a tensor in a ``.distcp`` file: an archive of ``torch.save`` that holds it alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Shaped

from moegeom.checkpoint.formats._pytorch_archive import TensorView, TorchArchive, read_torch_archive
from moegeom.checkpoint.formats._pytorch_globals import PickledTensor, UnreadableTensor
from moegeom.checkpoint.reading import RangeFile
from moegeom.checkpoint.store import TensorInfo
from moegeom.core.errors import CheckpointError

#: Bytes that an archive has beside its tensor: 1500 in torch 2.13.
_BESIDE = 65_536


@dataclass(frozen=True)
class PieceArchive:
    """A piece as ``info`` describes it, in ``length`` bytes of a file; ``what`` names it."""

    file: RangeFile
    info: TensorInfo
    length: int
    what: str

    def read(self) -> Shaped[np.ndarray, "*shape"]:
        """The piece; one read, as long as there is little beside the tensor in its archive."""
        part = self._part
        if self.length > self.info.size_bytes + _BESIDE:
            archive, view = self._open(part)
        else:
            archive, view = self._open(LoadedPart(part.read_all(self.length), self.what))
        return archive.read(view, self.what)

    def read_bytes(self, start: int, size: int) -> bytes:
        """A part of the piece; reads the archive's directory and that part."""
        archive, view = self._open(self._part)
        return archive.read_bytes(view, start, size)

    @property
    def _part(self) -> FilePart:
        return FilePart(self.file, self.info.offset, self.length, self.what)

    def _open(self, part: RangeFile) -> tuple[TorchArchive, TensorView]:
        """The archive, whose tensor has the dtype and the shape that the metadata promises."""
        archive = read_torch_archive(part)
        if not isinstance(archive.root, (PickledTensor, UnreadableTensor)):
            raise CheckpointError(
                f"{self.what} is a {type(archive.root).__name__}, expected one tensor."
            )
        view = archive.view(archive.root, self.what)
        info = self.info
        if (view.dtype, view.shape) != (info.dtype, info.shape):
            raise CheckpointError(
                f"{self.what} is {view.dtype} of shape {view.shape}, expected {info.dtype} of "
                f"shape {info.shape}.",
                "Do the metadata and this file come from the same save?",
            )
        return archive, view


@dataclass(frozen=True)
class FilePart:
    """Bytes ``[offset, offset + length)`` of a file; reads are counted where the file counts."""

    file: RangeFile
    offset: int
    length: int
    label: str

    def size_bytes(self) -> int:
        return self.length

    def read(self, offset: int, size: int) -> bytes:
        _check_inside(self.label, self.length, offset, size)
        return self.file.read(self.offset + offset, size)

    def read_all(self, limit: int) -> bytes:
        _check_limit(self.label, self.length, limit)
        return self.read(0, self.length)


@dataclass(frozen=True)
class LoadedPart:
    """Bytes that were read before, as a file."""

    raw: bytes
    label: str

    def size_bytes(self) -> int:
        return len(self.raw)

    def read(self, offset: int, size: int) -> bytes:
        _check_inside(self.label, len(self.raw), offset, size)
        return self.raw[offset : offset + size]

    def read_all(self, limit: int) -> bytes:
        _check_limit(self.label, len(self.raw), limit)
        return self.raw


def _check_inside(label: str, length: int, offset: int, size: int) -> None:
    if offset < 0 or size < 0 or offset + size > length:
        raise CheckpointError(
            f"{label}: truncated, bytes {offset} to {offset + size} were expected and it has "
            f"{length}."
        )


def _check_limit(label: str, length: int, limit: int) -> None:
    if length > limit:
        raise CheckpointError(f"{label}: has {length} bytes, more than the {limit} allowed.")
