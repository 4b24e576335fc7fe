"""Arrays of numbers in files of others: npy, npz, safetensors, parquet, and what torch.save wrote.

An array is that of one router, or in npy, npz and tensors of torch of all routers. In npz,
safetensors, parquet and dictionaries of torch, integers ``document``, ``position`` and ``token_id``
are facts about the tokens.

Ranges of tokens are read where they lie in the file. Compressed members of an npz cannot be: they
are held in memory, up to a limit.

A pickle of torch is interpreted with the allow-list of checkpoints, so nothing in it runs and torch
is not needed. Of a tuple or list the n-th tensor belongs to the n-th router, as in
``router_logits``. A dict that holds it under that name may hold ``attention_mask`` and
``input_ids`` of the batch beside it: padding is left out then, and the sequences of the batch are
documents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from moegeom.core.limits import NPZ_HELD_BYTES, PT_HELD_BYTES
from moegeom.core.shapes import Bool
from moegeom.core.text import number_of
from moegeom.core.tokens import TokenSource
from moegeom.tokens.foreign.arrays import (
    BATCH,
    MASK,
    PADDING_COUNTED,
    TOKENS,
    Form,
    assign_layers,
    columns_of_batch,
    foreign_source,
    foreign_tensor,
    layers_in_file,
    layers_in_memory,
    open_arrays,
    open_tensor_file,
    refuse_other_dtype,
    refuse_other_form,
)
from moegeom.tokens.foreign.npy import NpyHeader, NpzMember, npz_members, read_npy_header
from moegeom.tokens.foreign.parquet_rows import ParquetTable
from moegeom.tokens.rows import ArrayRows, Rows
from moegeom.tokens.source import Request, Source


def _named(suffix: str) -> Callable[[Path], bool]:
    """True for files of that ending."""
    return lambda path: path.suffix == suffix and path.is_file()


# ------------------------------------------------------------------------------------------ NumPy


def open_npy(path: Path, request: Request) -> TokenSource:
    """One array, whose key is the file name without ``.npy``."""

    def layers(_key: str, dtypes: Collection[np.dtype], form: Form) -> Sequence[Rows]:
        with open_regular(path, follows=True) as stream:
            header = read_npy_header(stream, path.name)
        _check_header(header, path.stat().st_size, path.name, dtypes, form)
        return layers_in_file(path, header.start, header.dtype, header.shape)

    return open_arrays(path, request, (path.stem,), layers, columns=())


def open_npz(path: Path, request: Request) -> TokenSource:
    """An array for each router, or one of all."""
    with npz_members(path) as members:
        by_key = {member.key: member for member in members}
        if len(by_key) < len(members):
            raise RecordingError(f"{path.name}: two arrays have the same name.")
        reader = _Members(path, by_key, [NPZ_HELD_BYTES + 4 * path.stat().st_size])
        return open_arrays(path, request, by_key, reader.layers)


@dataclass(frozen=True)
class _Members:
    """Arrays of an archive; ``left`` are the bytes that may still be held in memory."""

    path: Path
    by_key: Mapping[str, NpzMember]
    left: list[int]

    def layers(self, key: str, dtypes: Collection[np.dtype], form: Form) -> Sequence[Rows]:
        member = self.by_key[key]
        with member.open() as stream:
            header = read_npy_header(stream, member.where)
            _check_header(header, member.size, member.where, dtypes, form)
            if member.is_stored:
                start = member.start + header.start
                return layers_in_file(self.path, start, header.dtype, header.shape)
            self.left[0] -= header.size_bytes
            if self.left[0] < 0:
                most = NPZ_HELD_BYTES + 4 * self.path.stat().st_size
                raise RecordingError(
                    f"{member.where}: compressed arrays of more than {most:,} bytes in all.",
                    "Save with np.savez, which does not compress: ranges are then read in place.",
                )
            raw = stream.read(header.size_bytes)
        header.refuse_short(len(raw), member.where)
        array = np.frombuffer(raw, header.dtype).reshape(header.shape)
        return layers_in_memory(array, member.where)


def _check_header(
    header: NpyHeader, size: int, where: str, dtypes: Collection[np.dtype], form: Form
) -> None:
    """Raises RecordingError unless ``size`` bytes hold an array of the form, row behind row."""
    if header.dtype.hasobject:
        raise RecordingError(
            f"{where}: the array holds pickled Python objects, which are never opened.",
            "Save an array of numbers.",
        )
    refuse_other_dtype(header.dtype.newbyteorder("="), dtypes, f"{where}: the array")
    refuse_other_form(header.shape, form, f"{where}: the array")
    if header.is_fortran:
        raise RecordingError(
            f"{where}: the array is stored column by column, so a range of tokens lies nowhere "
            "together.",
            "Save np.ascontiguousarray(array).",
        )
    header.refuse_short(size - header.start, where)


NPY = Source("npy", _named(".npy"), open_npy, needs_stage=True)
NPZ = Source("npz", _named(".npz"), open_npz, needs_stage=True)


# --------------------------------------------------------------------------- safetensors, parquet


def open_safetensors(path: Path, request: Request) -> TokenSource:
    """A tensor for each router."""
    file = open_tensor_file(path)

    def layers(key: str, dtypes: Collection[np.dtype], form: Form) -> Sequence[Rows]:
        return [file.rows(key, dtypes, () if form == "column" else ("width",))]

    return open_arrays(path, request, sorted(file.names), layers, may_stack=False)


def open_parquet(path: Path, request: Request) -> TokenSource:
    """A list column for each router, each list as long as the width."""
    table = ParquetTable(path)
    names = table.schema.names
    if len(set(names)) < len(names):
        raise RecordingError(f"{path.name}: two columns have the same name.")

    def layers(key: str, dtypes: Collection[np.dtype], form: Form) -> Sequence[Rows]:
        return [table.rows(key, dtypes, form == "column")]

    return open_arrays(path, request, names, layers, may_stack=False)


SAFETENSORS = Source("safetensors", _named(".safetensors"), open_safetensors, needs_stage=True)
PARQUET = Source("parquet", _named(".parquet"), open_parquet, needs_stage=True)


# ------------------------------------------------------------------------------------------ torch

_SUFFIXES = (".pt", ".pth", ".bin")

#: How a zip archive begins, which files of torch have been since version 1.6.
_ARCHIVE = b"PK\x03\x04"

#: Which rows are tokens; None for all.
_Mask = Bool[np.ndarray, "rows"] | None

_SAVE = "Save the tensors alone: torch.save(outputs.router_logits, file)."


def is_torch_archive(path: Path) -> bool:
    """True for archives of torch, by name and beginning."""
    if path.suffix.lower() not in _SUFFIXES or not path.is_file():
        return False
    with open_regular(path, follows=True) as file:
        return file.read(len(_ARCHIVE)) == _ARCHIVE


def open_torch(path: Path, request: Request) -> TokenSource:
    """One tensor, a tuple or list of them, or a dict."""
    _, tensor = foreign_tensor(path, request)
    dtypes = tuple(tensor.dtypes.values())
    try:
        archive = read_torch_archive(CountingFile(path, path.name, ReadLog()))
        root = archive.root
        reader = _Tensors(path, archive, [PT_HELD_BYTES])
        if isinstance(root, dict | list | tuple) and not root:
            raise RecordingError(f"{path.name}: holds an empty {type(root).__name__}.", _SAVE)
        if not isinstance(root, dict):
            layers = reader.all_layers(root, dtypes)
            rows = assign_layers(path, path.stem, layers, request)
            notes = (PADDING_COUNTED,) * isinstance(root, list | tuple)
            return foreign_source(path, request, rows, {}, notes=notes)
        if BATCH in root:
            rows, columns = _of_batch(reader, root, request, dtypes)
            notes = () if MASK in root else (PADDING_COUNTED,)
            return foreign_source(path, request, rows, columns, notes=notes)
        if odd := [key for key in root if not isinstance(key, str | int)]:
            message = f"{path.name}: a key is a {type(odd[0]).__name__}; expected names or numbers."
            raise RecordingError(message, _SAVE)
        by_text = {str(key): value for key, value in root.items()}
        return open_arrays(
            path,
            request,
            by_text,
            lambda key, dtypes, form: reader.layers(by_text[key], key, dtypes, form),
            may_stack=False,
        )
    except CheckpointError as error:
        raise RecordingError(error.message, error.hint or _SAVE) from None


def _of_batch(
    reader: _Tensors, root: Mapping[Any, Any], request: Request, dtypes: Collection[np.dtype]
) -> tuple[dict[str, Rows], dict[str, Rows]]:
    """Rows of the routers and columns of a batch, (sequences, length), without its padding.

    Raises
    ------
    RecordingError
        When mask or token ids are of another batch.
    """
    beside = {name: reader.whole(root[name], name) for name in (MASK, TOKENS) if name in root}
    mask = None if MASK not in beside else beside[MASK].reshape(-1) != 0
    layers = reader.all_layers(root[BATCH], dtypes, mask)
    num_rows = layers[0].num_rows if mask is None else len(mask)
    _, columns = columns_of_batch(beside, num_rows, reader.path.name, "Save")
    return assign_layers(reader.path, BATCH, layers, request), {
        name: ArrayRows(values[:, None], reader.path.name) for name, values in columns.items()
    }


@dataclass(frozen=True)
class _Tensors:
    """Tensors of one file; ``left`` are the bytes that may still be held in memory."""

    path: Path
    archive: TorchArchive
    left: list[int]

    def layers(
        self, value: Any, key: str, dtypes: Collection[np.dtype], form: Form, mask: _Mask = None
    ) -> Sequence[Rows]:
        """Each layer in place, or in memory where it is strided or rows are masked out."""
        where = f"{self.path.name}: {key}"
        view = self._view(value, where)
        stored = DTYPES.get(view.dtype)
        dtype = None if stored is None else stored.numpy
        refuse_other_dtype(view.dtype if dtype is None else dtype, dtypes, where)
        assert dtype is not None
        refuse_other_form(view.shape, form, where, noun="tensor")
        num_rows = view.shape[len(view.shape) == 3]
        if mask is not None and len(mask) != num_rows:
            raise RecordingError(
                f"{where} has {number_of(num_rows, 'row')}; {MASK} is of "
                f"{number_of(len(mask), 'token')}.",
                "Save the mask of the same batch.",
            )
        if view.is_contiguous and (mask is None or mask.all()):
            return layers_in_file(self.path, view.offset, dtype, view.shape)
        array = self._read(view, where)
        if mask is not None:
            array = array[..., mask, :]
        return layers_in_memory(array, where)

    def all_layers(
        self, value: Any, dtypes: Collection[np.dtype], mask: _Mask = None
    ) -> Sequence[Rows]:
        """The layers of a tuple, a list or a stack; only the rows where ``mask`` is true."""
        if not isinstance(value, list | tuple):
            return self.layers(value, "the tensor", dtypes, "layers", mask)
        if not value:
            raise RecordingError(f"{self.path.name}: holds an empty {type(value).__name__}.", _SAVE)
        return [
            self.layers(one, f"item {n}", dtypes, "rows", mask)[0] for n, one in enumerate(value)
        ]

    def whole(self, value: Any, key: str) -> np.ndarray:
        """A tensor of integers or truth values, in memory."""
        where = f"{self.path.name}: {key}"
        array = self._read(self._view(value, where), where)
        if array.dtype.kind not in "iub" or (array.dtype.kind != "b" and array.min(initial=0) < 0):
            raise RecordingError(f"{where} is {array.dtype}; expected whole numbers from 0 on.")
        return array

    def _view(self, value: Any, where: str) -> TensorView:
        if not isinstance(value, PickledTensor | UnreadableTensor):
            raise RecordingError(f"{where} is a {type(value).__name__}; expected a tensor.", _SAVE)
        return self.archive.view(value, where)

    def _read(self, view: TensorView, where: str) -> np.ndarray:
        self.left[0] -= view.size_bytes
        if self.left[0] < 0:
            raise RecordingError(
                f"{where}: tensors of more than {PT_HELD_BYTES:,} bytes that "
                "do not lie in one piece, or of which padding is left out.",
                "Save tensor.contiguous(), without padding.",
            )
        return self.archive.read(view, where)


TORCH = Source("pt", is_torch_archive, open_torch, needs_stage=True)
