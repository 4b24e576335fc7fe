"""Tensors that ``torch.save`` wrote: one, a tuple or list of them, or a dict.

The pickle is interpreted with the allow-list of checkpoints, so nothing in it runs and torch is
not needed. Of a tuple or list the n-th tensor belongs to the n-th router, as in ``router_logits``.
A dict that holds it under that name may hold ``attention_mask`` and ``input_ids`` of the batch
beside it: padding is left out then, and the sequences of the batch are documents.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import DTYPES
from moegeom.checkpoint.formats.pytorch import (
    PickledTensor,
    TensorView,
    TorchArchive,
    UnreadableTensor,
    read_torch_archive,
)
from moegeom.checkpoint.reading import CountingFile, ReadLog
from moegeom.core.errors import CheckpointError, RecordingError
from moegeom.core.files import open_regular
from moegeom.core.limits import PT_HELD_BYTES
from moegeom.core.shapes import Bool
from moegeom.core.text import number_of
from moegeom.core.tokens import TokenSource
from moegeom.tokens.foreign.arrays import (
    COLUMN_DTYPES,
    COLUMN_KEYS,
    assign_layers,
    assign_routers,
    foreign_source,
    foreign_tensor,
)
from moegeom.tokens.foreign.npy import flattening
from moegeom.tokens.rows import ArrayRows, FileRows, Rows
from moegeom.tokens.source import Request, Source

_SUFFIXES = (".pt", ".pth", ".bin")

#: How a zip archive begins, which files of torch have been since version 1.6.
_ARCHIVE = b"PK\x03\x04"

#: Which rows are tokens; None for all.
_Mask = Bool[np.ndarray, "rows"] | None

_SAVE = "Save the tensors alone: torch.save(outputs.router_logits, file)."


def recognises(path: Path) -> bool:
    """True for archives of torch, by name and beginning."""
    if path.suffix.lower() not in _SUFFIXES or not path.is_file():
        return False
    with open_regular(path, follows=True) as file:
        return file.read(len(_ARCHIVE)) == _ARCHIVE


def open_source(path: Path, request: Request) -> TokenSource:
    """The tensors, read range by range."""
    tensor = foreign_tensor(path, request)
    try:
        return _opened(path, request, tuple(tensor.dtypes.values()))
    except CheckpointError as error:
        raise RecordingError(error.message, error.hint or _SAVE) from None


def _opened(path: Path, request: Request, dtypes: Collection[np.dtype]) -> TokenSource:
    archive = read_torch_archive(CountingFile(path, path.name, ReadLog()))
    root = archive.root
    reader = _Tensors(path, archive, [PT_HELD_BYTES])
    columns: dict[str, Rows] = {}
    if isinstance(root, dict | list | tuple) and not root:
        raise RecordingError(f"{path.name}: holds an empty {type(root).__name__}.", _SAVE)
    if isinstance(root, dict) and _BATCH in root:
        rows, columns = _of_batch(reader, root, request, dtypes)
    elif isinstance(root, dict):
        if odd := [key for key in root if not isinstance(key, str | int)]:
            message = f"{path.name}: a key is a {type(odd[0]).__name__}; expected names or numbers."
            raise RecordingError(message, _SAVE)
        keys = [str(key) for key in root if key not in COLUMN_KEYS]
        by_text = {str(key): value for key, value in root.items()}
        routers = assign_routers(path, keys, request)
        rows = {r: reader.rows(by_text[key], key, dtypes) for r, key in routers.items()}
        columns = {key: reader.column(root[key], key) for key in COLUMN_KEYS if key in root}
    else:
        rows = assign_layers(path, path.stem, reader.all_layers(root, dtypes), request)
    return foreign_source(path, request, foreign_tensor(path, request), rows, columns)


#: What transformers calls the tuple, and the tensors of the batch that it was computed from.
_BATCH, _MASK, _TOKENS = "router_logits", "attention_mask", "input_ids"


def _of_batch(
    reader: _Tensors, root: Mapping[Any, Any], request: Request, dtypes: Collection[np.dtype]
) -> tuple[dict[str, Rows], dict[str, Rows]]:
    """Rows of the routers and columns of a batch, (sequences, length), without its padding.

    Raises
    ------
    RecordingError
        When mask or token ids are of another batch.
    """
    beside = {name: reader.whole(root[name], name) for name in (_MASK, _TOKENS) if name in root}
    mask = None if _MASK not in beside else beside[_MASK].reshape(-1) != 0
    layers = reader.all_layers(root[_BATCH], dtypes, mask)
    num_rows = layers[0].num_rows if mask is None else len(mask)
    for name, tensor in beside.items():
        if tensor.ndim != 2 or tensor.size != num_rows:
            raise RecordingError(
                f"{reader.path.name}: {name} has shape {tensor.shape}; {_BATCH} has "
                f"{number_of(num_rows, 'row')}: expected (sequences, length), as many.",
                "Save those of the same batch.",
            )
    rows = assign_layers(reader.path, _BATCH, layers, request)
    if not beside:
        return rows, {}
    shape = next(iter(beside.values())).shape
    columns = {"document": np.repeat(np.arange(shape[0]), shape[1])}
    if _TOKENS in beside:
        columns["token_id"] = beside[_TOKENS].reshape(-1).astype(np.int64)
    used = slice(None) if mask is None else mask
    return rows, {
        name: ArrayRows(values[used][:, None], reader.path.name) for name, values in columns.items()
    }


@dataclass(frozen=True)
class _Tensors:
    """Tensors of one file; ``left`` are the bytes that may still be held in memory."""

    path: Path
    archive: TorchArchive
    left: list[int]

    def rows(self, value: Any, key: str, dtypes: Collection[np.dtype], mask: _Mask = None) -> Rows:
        view, dtype = self._view(value, key, dtypes)
        if len(view.shape) != 2 or 0 in view.shape:
            raise self._refusal(key, view, "(tokens, width)")
        return self._placed(view, dtype, key, 1, mask)[0]

    def all_layers(
        self, value: Any, dtypes: Collection[np.dtype], mask: _Mask = None
    ) -> list[Rows]:
        """The layers of a tuple, a list or a stack; only the rows where ``mask`` is true."""
        if not isinstance(value, list | tuple):
            return self.layers(value, "the tensor", dtypes, mask)
        if not value:
            raise RecordingError(f"{self.path.name}: holds an empty {type(value).__name__}.", _SAVE)
        return [self.rows(one, f"item {n}", dtypes, mask) for n, one in enumerate(value)]

    def whole(self, value: Any, key: str) -> np.ndarray:
        """A tensor of integers or truth values, in memory."""
        where = f"{self.path.name}: {key}"
        if not isinstance(value, PickledTensor | UnreadableTensor):
            raise RecordingError(f"{where} is a {type(value).__name__}; expected a tensor.", _SAVE)
        view = self.archive.view(value, where)
        self._spend(view.size_bytes, key)
        array = self.archive.read(view, where)
        if array.dtype.kind not in "iub" or (array.dtype.kind != "b" and array.min(initial=0) < 0):
            raise RecordingError(f"{where} is {array.dtype}; expected whole numbers from 0 on.")
        return array

    def column(self, value: Any, key: str) -> Rows:
        view, dtype = self._view(value, key, COLUMN_DTYPES)
        if len(view.shape) != 1 or 0 in view.shape:
            raise self._refusal(key, view, "(tokens,)", is_column=True)
        return self._placed(view, dtype, key, 1)[0]

    def layers(
        self, value: Any, key: str, dtypes: Collection[np.dtype], mask: _Mask = None
    ) -> list[Rows]:
        view, dtype = self._view(value, key, dtypes)
        if len(view.shape) not in (2, 3) or 0 in view.shape:
            expected = "(tokens, width) or (layers, tokens, width)"
            raise self._refusal(key, view, expected, may_stack=True)
        num_layers = view.shape[0] if len(view.shape) == 3 else 1
        return self._placed(view, dtype, key, num_layers, mask)

    def _view(
        self, value: Any, key: str, dtypes: Collection[np.dtype]
    ) -> tuple[TensorView, np.dtype]:
        where = f"{self.path.name}: {key}"
        if not isinstance(value, PickledTensor | UnreadableTensor):
            raise RecordingError(f"{where} is a {type(value).__name__}; expected a tensor.", _SAVE)
        view = self.archive.view(value, where)
        stored = DTYPES.get(view.dtype)
        if stored is None or stored.numpy is None or stored.numpy not in dtypes:
            expected = " or ".join(map(str, dtypes))
            raise RecordingError(f"{where} is {view.dtype}; expected {expected}.")
        return view, stored.numpy

    def _refusal(
        self,
        key: str,
        view: TensorView,
        expected: str,
        is_column: bool = False,
        may_stack: bool = False,
    ) -> RecordingError:
        return RecordingError(
            f"{self.path.name}: {key} has shape {view.shape}; expected {expected}.",
            flattening("tensor", len(view.shape), is_column, may_stack),
        )

    def _placed(
        self, view: TensorView, dtype: np.dtype, key: str, num_layers: int, mask: _Mask = None
    ) -> list[Rows]:
        """Each layer in place, or in memory where it is strided or rows are masked out."""
        is_stack = len(view.shape) == 3
        num_rows, *row = view.shape[is_stack:]
        row_shape = tuple(row) or (1,)
        if mask is not None and len(mask) != num_rows:
            raise RecordingError(
                f"{self.path.name}: {key} has {number_of(num_rows, 'row')}; {_MASK} is of "
                f"{number_of(len(mask), 'token')}.",
                "Save the mask of the same batch.",
            )
        if view.is_contiguous and (mask is None or mask.all()):
            size = view.size_bytes // num_layers
            starts = range(view.offset, view.offset + view.size_bytes, size)
            return [FileRows(self.path, s, dtype, num_rows, row_shape) for s in starts]
        self._spend(view.size_bytes, key)
        array = self.archive.read(view, f"{self.path.name}: {key}")
        parts = array.reshape(num_layers, num_rows, -1)
        if mask is not None:
            parts = parts[:, mask]
        return [ArrayRows(part, f"{self.path.name}: {key}") for part in parts]

    def _spend(self, size: int, key: str) -> None:
        self.left[0] -= size
        if self.left[0] < 0:
            raise RecordingError(
                f"{self.path.name}: {key}: tensors of more than {PT_HELD_BYTES:,} bytes that "
                "do not lie in one piece, or of which padding is left out.",
                "Save tensor.contiguous(), without padding.",
            )


SOURCE = Source("pt", recognises, open_source, needs_stage=True)
