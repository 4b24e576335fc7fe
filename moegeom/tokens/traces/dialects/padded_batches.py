"""Padded batches of trainers: verl and AReaL, and tunix.

The arrays of a batch by name, in npz, safetensors, or a dictionary that ``torch.save`` wrote; of
them ``routed_experts``, (sequences, padded length, layers, k), and what says which rows are tokens.
They are read by ranges of sequences, so that a file may be of any size.

verl and AReaL (the batch of a ``DataProto``, or a trajectory) hold ``attention_mask`` and
``input_ids``. verl pads prompts on the left, and rows of padding, of the last token and of tool
outputs are zeros. AReaL repeats the row before a row that is missing, and says in
``r3_routing_valid`` which sequences it had to fill so.

tunix (an ``RLTrainerPayload``) holds ``prompt_ids``, ``prompt_mask``, ``completion_ids`` and
``completion_mask``. Prompts are padded on the left, completions on the right. -1 is written where
no expert was captured: in padding, and for the last token. The mask of a completion may leave out
tokens that are not trained (answers of tools); they have been routed all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import DTYPES
from moegeom.core.errors import RecordingError
from moegeom.core.limits import TRACE_BYTES
from moegeom.core.shapes import Bool, Integer, Shaped
from moegeom.tokens.foreign.arrays import open_tensor_file
from moegeom.tokens.foreign.npy import npz_rows, npz_shapes
from moegeom.tokens.rows import FileRows, Rows
from moegeom.tokens.traces.dialects._torch_file import has_keys, open_torch_file
from moegeom.tokens.traces.trace import (
    PIECE_BYTES,
    Dialect,
    Pieces,
    Place,
    RequestTrace,
    Trace,
    counted_notes,
)

#: What trainers call the ids of a batch.
_IDS = "routed_experts"

_MASK, _TOKENS, _VALID = "attention_mask", "input_ids", "r3_routing_valid"

_PROMPT, _COMPLETION, _SEGMENTS = "prompt_ids", "completion_ids", "segment_ids"
_PROMPT_MASK, _COMPLETION_MASK = "prompt_mask", "completion_mask"

_Arrays = Mapping[str, np.ndarray]

#: The token ids and masks of sequences; None where nothing says them.
_Sequences = tuple[
    Integer[np.ndarray, "sequences tokens"] | None, Bool[np.ndarray, "sequences tokens"] | None
]


def read_verl(path: Path, place: Place) -> Pieces:
    """Sequences by pieces, with their masks if there are any; invalid ones are counted."""
    arrays = _batch_rows(path, (_TOKENS,), (_MASK, _VALID))
    for name, num_axes in ((_MASK, 2), (_TOKENS, 2), (_VALID, 1)):
        _refuse_other_shape(path, arrays, name, _shape_of(arrays[_IDS])[:num_axes])

    def sequences(part: _Arrays, start: int) -> _Sequences:
        # padded token ids without a mask say nothing about which are tokens
        return (part.get(_TOKENS), part[_MASK] != 0) if _MASK in part else (None, None)

    return _pieces(path, place, "verl or AReaL", arrays, sequences)


DIALECT = Dialect(
    name="verl",
    versions="verl 0.9.1; AReaL PR 1496 as of 2026-07",
    source="verl/experimental/agent_loop/agent_loop.py (routed_experts); areal/engine/r3 "
    "preprocess.py (preprocess_routed_experts_batch)",
    recognises=lambda path: _holds_ids(path, _MASK),
    pieces=read_verl,
)


def read_tunix(path: Path, place: Place) -> Pieces:
    """Sequences by pieces; those without any captured row stay, for the cleaning."""
    arrays = _batch_rows(path, (_PROMPT, _COMPLETION, _SEGMENTS), (_PROMPT_MASK, _COMPLETION_MASK))
    missing = sorted({_PROMPT, _COMPLETION, _PROMPT_MASK, _COMPLETION_MASK} - set(arrays))
    if missing:
        raise RecordingError(
            f"{path.name}: lacks {', '.join(missing)}; expected them beside {_IDS}.",
            "Save these arrays of the payload too: without them nothing says which rows are "
            "tokens.",
        )
    num, length = _shape_of(arrays[_IDS])[:2]
    width = arrays[_PROMPT].row_shape[0] if len(arrays[_PROMPT].row_shape) == 1 else -1
    for name in (_PROMPT, _PROMPT_MASK):
        _refuse_other_shape(path, arrays, name, (num, width))
    for name in (_COMPLETION, _COMPLETION_MASK):
        _refuse_other_shape(path, arrays, name, (num, length - width))
    _refuse_other_shape(path, arrays, _SEGMENTS, (num, length))

    def sequences(part: _Arrays, start: int) -> _Sequences:
        for number, row in enumerate(part.get(_SEGMENTS, ()), start=start):
            if len(np.unique(row[row > 0])) > 1:
                raise RecordingError(
                    f"{path.name}: row {number} of {_SEGMENTS} holds several sequences; expected "
                    "one sequence to a row.",
                    "Save payloads before they are packed.",
                )
        # a completion ends with its last token that is trained
        num_trained_from = np.cumsum(part[_COMPLETION_MASK][:, ::-1] != 0, axis=1)[:, ::-1]
        mask = np.concatenate([part[_PROMPT_MASK] != 0, num_trained_from > 0], axis=1)
        return np.concatenate([part[_PROMPT], part[_COMPLETION]], axis=1), mask

    return _pieces(path, place, "tunix", arrays, sequences)


TUNIX = Dialect(
    name="tunix",
    versions="tunix PR 2046 as merged (2026-08-31)",
    source="tunix RLTrainerPayload (routed_experts, UNSET_ROUTED_EXPERT) and its padded batch "
    "assembly",
    recognises=lambda path: _holds_ids(path, _PROMPT, _COMPLETION),
    pieces=read_tunix,
)


def _pieces(
    path: Path,
    place: Place,
    writer: str,
    arrays: Mapping[str, Rows],
    sequences: Callable[[_Arrays, int], _Sequences],
) -> Pieces:
    """The sequences that are valid, by pieces."""
    ids = arrays[_IDS]
    for start, stop in _ranges_of(path, ids, place[0]):
        part = {name: _read_rows(rows, start, stop) for name, rows in arrays.items()}
        token_ids, mask = sequences(part, start)
        requests = [
            RequestTrace(
                str(start + number),
                of_sequence,
                token_ids=None if token_ids is None else token_ids[number],
                mask=None if mask is None else mask[number],
                is_place=True,
            )
            for number, of_sequence in enumerate(part[_IDS])
            if _VALID not in part or part[_VALID][number]
        ]
        num_filled = len(part[_IDS]) - len(requests)
        notes = counted_notes({"sequences whose rows the trainer filled up, left out": num_filled})
        yield (
            Trace(path.name, writer, tuple(requests), notes=notes),
            (stop, 0) if stop < ids.num_rows else None,
        )


def _holds_ids(path: Path, *beside: str) -> bool:
    """Whether a file holds such ids, and every array of ``beside``."""
    if path.suffix == ".npz" and path.is_file():
        shapes = npz_shapes(path)
        return len(shapes.get(_IDS) or ()) == 4 and set(beside) <= set(shapes)
    if path.suffix == ".safetensors" and path.is_file():
        try:
            return {_IDS, *beside} <= set(open_tensor_file(path).names)
        except RecordingError:
            return False
    return has_keys(path, _IDS, *beside)


def _batch_rows(path: Path, names: Collection[str], masks: Collection[str]) -> dict[str, Rows]:
    """Those of the arrays ``names`` and ``masks`` that the file holds, and the ids, a sequence to a
    row; ids must be there.

    Raises
    ------
    RecordingError
        When it is none of the three kinds of file, is damaged, or its ids have other than four
        dimensions.
    """
    if path.suffix not in _READERS:
        raise RecordingError(
            f"{path.name}: expected one of {', '.join(_READERS)}.",
            "Save the tensors of the batch: np.savez, safetensors, or torch.save of a dictionary.",
        )
    arrays = _READERS[path.suffix](path, (_IDS, *names), masks)
    ids = arrays.get(_IDS)
    if ids is None or len(ids.row_shape) != 3:
        shape = "none" if ids is None else str(_shape_of(ids))
        raise RecordingError(
            f"{path.name}: {_IDS} has shape {shape}; expected (sequences, tokens, layers, k)."
        )
    return arrays


def _shape_of(rows: Rows) -> tuple[int, ...]:
    """The shape of the whole array."""
    return (rows.num_rows, *rows.row_shape)


def _refuse_other_shape(
    path: Path, arrays: Mapping[str, Rows], name: str, expected: tuple[int, ...]
) -> None:
    """Raises RecordingError where an array that is there has another shape than the ids ask for."""
    rows = arrays.get(name)
    if rows is not None and _shape_of(rows) != expected:
        raise RecordingError(
            f"{path.name}: {name} has shape {_shape_of(rows)}; {_IDS} has {expected}."
        )


def _read_rows(rows: Rows, start: int, stop: int) -> Shaped[np.ndarray, "sequences *row"]:
    """Rows ``[start, stop)`` in memory, as stored."""
    out = np.empty((max(stop - start, 0), rows.width), rows.dtype)
    rows.read_into(start, out)
    return out.reshape(len(out), *rows.row_shape)


def _ranges_of(path: Path, ids: Rows, first: int) -> Iterator[tuple[int, int]]:
    """Ranges of sequences from ``first`` on with some ``PIECE_BYTES`` of ids; one is empty where
    there is none.

    Raises
    ------
    RecordingError
        When one sequence is too large to be held.
    """
    each = ids.width * ids.dtype.itemsize
    if each > TRACE_BYTES:
        raise RecordingError(
            f"{path.name}: {each:,} bytes of ids of one sequence, more than the {TRACE_BYTES:,} "
            "allowed.",
            "Cut the padding behind the longest sequence.",
        )
    step = max(1, PIECE_BYTES // max(each, 1))
    for start in range(first, ids.num_rows, step) or (first,):
        yield start, min(start + step, ids.num_rows)


def _safetensors(path: Path, names: Collection[str], masks: Collection[str]) -> dict[str, Rows]:
    opened = open_tensor_file(path)
    arrays: dict[str, Rows] = {}
    for name in (*names, *masks):
        if name in opened.names:
            info = opened.file.info(name)
            dtype = DTYPES.get(info.dtype)
            if dtype is None or dtype.numpy is None or dtype.numpy.kind not in "iub":
                raise RecordingError(f"{path.name}: {name} is {info.dtype}; expected integers.")
            shape = info.shape or (0,)
            arrays[name] = FileRows(path, info.offset, dtype.numpy, shape[0], tuple(shape[1:]))
    return arrays


def _torch(path: Path, names: Collection[str], masks: Collection[str]) -> dict[str, Rows]:
    file = open_torch_file(path)
    root: Any = file.root
    if not isinstance(root, dict):
        raise RecordingError(f"{path.name}: holds {type(root).__name__}; expected a dictionary.")
    return {
        name: file.rows(root[name], f"{path.name}: {name}")
        for name in (*names, *masks)
        if name in root
    }


_READERS: Mapping[str, Callable[[Path, Collection[str], Collection[str]], dict[str, Rows]]] = {
    ".npz": npz_rows,
    ".safetensors": _safetensors,
    ".pt": _torch,
    ".pth": _torch,
}
