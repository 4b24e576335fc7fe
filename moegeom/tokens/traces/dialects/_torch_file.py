"""What ``torch.save`` wrote, as plain values: tensors and NumPy arrays of integers, and no code.

The pickle is interpreted with the allow-list of checkpoints; NumPy arrays, which trainers put
beside tensors, are read as data too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import DTYPES
from moegeom.checkpoint.formats.pytorch import (
    ALLOWED,
    PickledTensor,
    TorchArchive,
    UnreadableTensor,
    folder_of_pickle,
    storage_of,
)
from moegeom.checkpoint.pickled import unpickle
from moegeom.checkpoint.reading import CountingFile, ReadLog
from moegeom.checkpoint.zipped import Archive, read_archive
from moegeom.core.errors import CheckpointError, RecordingError
from moegeom.core.limits import PICKLE_BYTES, TRACE_BYTES
from moegeom.core.shapes import Bool, Integer
from moegeom.tokens.rows import ArrayRows, FileRows, Rows

#: Bytes of the length in front of a text, by protocol.
_LENGTH_BYTES = (1, 4)

#: What an array costs at least.
_LEAST_SPENT = 1024

#: dtypes of NumPy by the code in a pickle.
_CODES = ("b1", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)))


@dataclass(eq=False)
class PickledArray:
    """A NumPy array as a pickle describes it; nothing is checked before it is asked for."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


@dataclass(eq=False)
class _PickledDtype:
    code: Any
    order: Any = "<"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


@dataclass(frozen=True, eq=False)
class _Encoded:
    """Bytes that protocol 2 spells as text."""

    text: Any
    encoding: Any


def _array(*_: Any) -> PickledArray:
    return PickledArray()


def _array_of_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> PickledArray:
    return PickledArray((1, shape, dtype, order == "F", raw))


def _dtype(code: Any, *_: Any) -> _PickledDtype:
    return _PickledDtype(code)


_ALLOWED: Mapping[str, Any] = {
    **ALLOWED,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.numeric._frombuffer": _array_of_buffer,
    "numpy._core.numeric._frombuffer": _array_of_buffer,
    "numpy.dtype": _dtype,
    "_codecs.encode": _Encoded,
}


@dataclass(frozen=True)
class TorchFile:
    """One file; ``root`` is whatever was saved. ``_budget`` is what may be read of its arrays."""

    path: Path
    archive: TorchArchive
    _budget: list[int]

    @property
    def label(self) -> str:
        return self.path.name

    @property
    def root(self) -> Any:
        return self.archive.root

    def array(self, value: Any, where: str) -> np.ndarray:
        """A tensor, a NumPy array or a flat list of integers.

        Raises
        ------
        RecordingError
            When it is none of them, damaged, or when it, or all arrays together, are too large.
        """
        if isinstance(value, PickledTensor | UnreadableTensor):
            view = self.archive.view(value, where)
            self._spend(view.size_bytes, where)
            return _integers(self.archive.read(view, where), where)
        if isinstance(value, PickledArray):
            return _numpy(value, where, self._spend)
        # flat only: lists in a pickle may hold each other over and over
        if isinstance(value, list):
            self._spend(8 * len(value), where)
            if all(type(item) is int and abs(item) < 2**62 for item in value):
                return np.array(value, np.int64)
        raise RecordingError(f"{where}: holds {type(value).__name__}; expected an array.")

    def rows(self, value: Any, where: str) -> Rows:
        """The same, to be read by ranges of its first axis: in place where it lies in one piece."""
        if isinstance(value, PickledTensor):
            view = self.archive.view(value, where)
            stored = DTYPES.get(view.dtype)
            dtype = None if stored is None else stored.numpy
            if dtype is not None and view.is_contiguous and view.shape:
                _integers(np.empty(0, dtype), where)
                return FileRows(self.path, view.offset, dtype, view.shape[0], view.shape[1:])
        array = self.array(value, where)
        return ArrayRows(array if array.ndim else array[None], where)

    def _spend(self, size: int, where: str) -> None:
        if size > TRACE_BYTES:
            raise RecordingError(
                f"{where}: {size:,} bytes in one array, more than the {TRACE_BYTES:,} allowed.",
                "Give the requests in several arrays.",
            )
        # one array may be referred to a million times, and each time is work
        self._budget[0] -= max(size, _LEAST_SPENT)
        if self._budget[0] < 0:
            raise RecordingError(
                f"{where}: tensors of more bytes than the file has.",
                "Save every tensor once, in several files if there are many.",
            )


def open_torch_file(path: Path) -> TorchFile:
    """The file, its pickle read and no tensor.

    Raises
    ------
    CheckpointError
        When it is no archive of torch, or its pickle names what is not allowed.
    """
    archive, folder, raw = _archive(path, PICKLE_BYTES + 1)
    if len(raw) > PICKLE_BYTES:
        raise CheckpointError(
            f"{path.name}: its pickle has more than the {PICKLE_BYTES:,} bytes allowed in one "
            "block: NumPy arrays lie inside it.",
            "Save fewer requests in each file, or tensors, which lie beside the pickle.",
        )
    root = unpickle(raw, path.name, _ALLOWED, storage_of)
    budget = max(TRACE_BYTES, 2 * path.stat().st_size)
    return TorchFile(path, TorchArchive(archive, folder, root), [budget])


def has_keys(path: Path, *keys: str) -> bool:
    """Whether a ``.pt`` file mentions every one of ``keys``, to recognise it by; not what holds it.

    The pickle is searched for texts of that length and content, and not interpreted.
    """
    if path.suffix not in (".pt", ".pth") or not path.is_file():
        return False
    try:
        _, _, raw = _archive(path, PICKLE_BYTES)
    except CheckpointError:
        return False
    # a pickle spells a text behind its length
    spelled = (
        [len(key).to_bytes(n, "little") + key.encode() for n in _LENGTH_BYTES] for key in keys
    )
    return all(any(spelling in raw for spelling in spellings) for spellings in spelled)


def _archive(path: Path, most: int) -> tuple[Archive, str, bytes]:
    """The archive, the folder of its tensors, and the first bytes of its pickle."""
    archive = read_archive(CountingFile(path, path.name, ReadLog()))
    folder = folder_of_pickle(archive)
    pickled = f"{folder}/data.pkl"
    start, size = archive.start(pickled), archive.entries[pickled].size
    return archive, folder, archive.file.read(start, min(size, most))


def _integers(
    array: np.ndarray, where: str
) -> Integer[np.ndarray, "..."] | Bool[np.ndarray, "..."]:
    if array.dtype.kind not in "iub":
        raise RecordingError(f"{where}: holds {array.dtype}; expected integers.")
    return array


def _numpy(
    pickled: PickledArray, where: str, spend: Callable[[int, str], None]
) -> Integer[np.ndarray, "..."] | Bool[np.ndarray, "..."]:
    """A pickled array: (version, shape, dtype, is_fortran, bytes)."""
    refusal = RecordingError(f"{where}: a NumPy array that is damaged or of no integers.")
    state = pickled.state
    if type(state) is not tuple or len(state) != 5:
        raise refusal
    _, shape, dtype, is_fortran, content = state
    if not isinstance(dtype, _PickledDtype) or type(shape) is not tuple or len(shape) > 16:
        raise refusal
    for text, allowed in ((dtype.code, _CODES), (dtype.order, ("<", "|"))):
        if not isinstance(text, str) or text not in allowed:
            raise refusal
    if not all(type(size) is int and 0 <= size < 2**40 for size in shape):
        raise refusal
    text = content.text if isinstance(content, _Encoded) else content
    if not isinstance(text, str | bytes):
        raise refusal
    spend(len(text), where)
    raw = _bytes(content, refusal)
    stored = np.dtype(dtype.code)
    needed = math.prod(shape) * stored.itemsize
    if needed != len(raw):
        raise RecordingError(
            f"{where}: {len(raw)} bytes; shape {shape} of {stored} needs {needed}.",
            "The file is truncated; copy it again.",
        )
    return np.frombuffer(raw, stored).reshape(shape, order="F" if is_fortran is True else "C")


def _bytes(content: Any, refusal: RecordingError) -> bytes:
    if isinstance(content, bytes):
        return content
    if isinstance(content, _Encoded) and content.encoding == "latin1":
        try:
            return content.text.encode("latin1")
        except UnicodeEncodeError:
            raise refusal from None
    raise refusal
