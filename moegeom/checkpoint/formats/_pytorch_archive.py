"""One archive of ``torch.save``: a pickle that describes tensors, and an entry for each storage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import as_array, numpy_dtype
from moegeom.checkpoint.formats._pytorch_globals import (
    ALLOWED,
    PickledTensor,
    Storage,
    StorageType,
    TorchDtype,
    UnreadableTensor,
    storage_of,
)
from moegeom.checkpoint.pickle.pickled import unpickle
from moegeom.checkpoint.reading import RangeFile
from moegeom.checkpoint.zipped import Archive, ZipEntry, read_archive
from moegeom.core import limits
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import TORCH_PICKLE_BYTES, TORCH_SPAN_BYTES
from moegeom.core.shapes import Shaped

#: What torch.save wrote first before version 1.6, when its files were no archives.
_OLD_MAGIC = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")

_RESAVE = "Write it again with a current torch: torch.save(torch.load(file), new_file)."


@dataclass(frozen=True)
class TensorView:
    """A tensor in the file: bytes ``[offset, offset + span)`` hold its elements at ``strides``."""

    dtype: str
    item: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    span: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item

    @property
    def is_contiguous(self) -> bool:
        """True when the range holds the elements in order, and nothing else."""
        expected = self.item
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return self.size_bytes == 0
            expected *= size
        return True


@dataclass(frozen=True)
class TorchArchive:
    """An archive and what its pickle describes; ``root`` is whatever was saved."""

    archive: Archive
    folder: str
    root: Any

    def view(self, tensor: PickledTensor | UnreadableTensor, where: str) -> TensorView:
        """Where a tensor lies, inside its storage; ``where`` begins the sentence of an error."""
        if isinstance(tensor, UnreadableTensor):
            raise CheckpointError(
                f"{where} is a {tensor.kind}, which cannot be read.",
                "Save it as a plain dense tensor.",
            )
        if isinstance(tensor.flags, dict) and any(tensor.flags.values()):
            raise CheckpointError(
                f"{where} is stored conjugated or negated, which cannot be read.",
                "Save tensor.resolve_conj().resolve_neg().",
            )
        dtype, name, entry, length = self._storage(tensor, where)
        offset = _count(tensor.offset, f"{where} has storage offset")
        shape = _counts(tensor.shape, f"{where} has shape")
        strides = _counts(tensor.stride, f"{where} has stride")
        if len(strides) != len(shape):
            raise CheckpointError(f"{where} has shape {shape} and stride {strides}.")
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        first, span = (0, 0) if 0 in shape else (offset, last + 1 - offset)
        if first + span > length:
            raise CheckpointError(
                f"{where} needs element {last} of a storage that has {length}.",
                "Download or copy this file again.",
            )
        if math.prod(shape) * dtype.size > entry.size:
            raise CheckpointError(
                f"{where} has shape {shape} and its storage {entry.size} bytes: it repeats them.",
                "Save tensor.contiguous().",
            )
        view = TensorView(
            dtype.name,
            dtype.size,
            shape,
            tuple(step * dtype.size for step in strides),
            self.archive.start(name) + first * dtype.size,
            span * dtype.size,
        )
        if not view.is_contiguous and view.span > TORCH_SPAN_BYTES:
            raise CheckpointError(
                f"{where} is spread over {view.span} bytes, more than the {TORCH_SPAN_BYTES} "
                "allowed.",
                "Save tensor.contiguous().",
            )
        return view

    def _storage(self, tensor: PickledTensor, where: str) -> tuple[TorchDtype, str, ZipEntry, int]:
        """Dtype, entry and elements of a tensor's storage."""
        storage = tensor.storage
        if not isinstance(storage, Storage) or not isinstance(storage.type, StorageType):
            raise CheckpointError(f"{where} has no storage.")
        dtype = storage.type.dtype if tensor.dtype is None else tensor.dtype
        if not isinstance(dtype, TorchDtype):
            raise CheckpointError(f"{where} has a dtype that is none.")
        name = f"{self.folder}/data/{storage.key}" if type(storage.key) is str else ""
        entry = self.archive.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{where} has a storage that is not in the archive.")
        num_bytes = _count(storage.length, f"{where} has a storage of") * storage.type.dtype.size
        if num_bytes > entry.size:
            raise CheckpointError(
                f"{where} has a storage of {num_bytes} bytes, and the archive {entry.size} of them."
            )
        return dtype, name, entry, num_bytes // dtype.size

    def read_bytes(self, view: TensorView, start: int, size: int) -> bytes:
        """``size`` bytes of a tensor, in the order of its elements, from byte ``start`` of it."""
        length = max(min(size, view.size_bytes - start), 0)
        if view.is_contiguous:
            return self.archive.file.read(view.offset + start, length)
        raw = self.archive.file.read(view.offset, view.span)
        # frombuffer wants whole elements only; their kind does not matter here
        items = np.frombuffer(raw, np.dtype((np.void, view.item)))
        strided = np.lib.stride_tricks.as_strided(items, view.shape, view.strides, writeable=False)
        return strided.tobytes()[start : start + length]

    def read(self, view: TensorView, where: str) -> Shaped[np.ndarray, "*shape"]:
        """The tensor in the dtype it is stored in."""
        dtype = numpy_dtype(view.dtype, where)
        return as_array(self.read_bytes(view, 0, view.size_bytes), dtype, view.shape, where)


def read_torch_archive(file: RangeFile) -> TorchArchive:
    """What one file holds; reads the zip directory and the pickle, and no tensor.

    Raises
    ------
    CheckpointError
        If the file is no archive, one that torch.save did not write, or refused by ``unpickle``.
    """
    if _OLD_MAGIC in file.read(0, min(file.size_bytes(), 32)):
        raise CheckpointError(
            f"{file.label}: was written by a torch before 1.6, whose files are no archives.",
            _RESAVE,
        )
    archive = read_archive(file)
    roots = [name for name in archive.entries if name.endswith("/data.pkl")]
    roots = [name for name in roots if name.count("/") == 1]
    if len(roots) != 1:
        raise CheckpointError(
            f"{file.label}: holds {len(roots)} pickles of data, expected the one of torch.save."
        )
    folder = roots[0].removesuffix("/data.pkl")
    if any(
        name.startswith((f"{folder}/code/", f"{folder}/constants.pkl")) for name in archive.entries
    ):
        raise CheckpointError(
            f"{file.label}: is a TorchScript archive.",
            "Save its weights: torch.save(torch.jit.load(file).state_dict(), new_file).",
        )
    order = f"{folder}/byteorder"
    if order in archive.entries and archive.read(order, 16) != b"little":
        raise CheckpointError(f"{file.label}: is not little-endian.", _RESAVE)
    raw = archive.read(roots[0], TORCH_PICKLE_BYTES)
    return TorchArchive(archive, folder, unpickle(raw, file.label, ALLOWED, storage_of))


def _count(number: Any, what: str) -> int:
    if type(number) is not int or not 0 <= number <= limits.LARGEST_COUNT:
        raise CheckpointError(f"{what} {_short(number)}, expected a non-negative 64-bit integer.")
    return number


def _counts(numbers: Any, what: str) -> tuple[int, ...]:
    if type(numbers) is not tuple or len(numbers) > limits.DIMENSIONS:
        raise CheckpointError(
            f"{what} {_short(numbers)}, expected at most {limits.DIMENSIONS} integers."
        )
    return tuple(_count(n, what) for n in numbers)


def _short(item: Any) -> str:
    """An integer as it stands, and the kind of anything else, which may have any size."""
    is_small = type(item) is int and abs(item) < 10**30
    return str(item) if is_small else f"a {type(item).__name__}"
