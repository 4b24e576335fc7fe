"""verl: ``routed_experts`` of a batch, (sequences, padded length, layers, k), beside its mask.

The batch of a ``DataProto`` saved as arrays (npz, safetensors, or a dictionary in a file of
``torch.save``): ``routed_experts``, ``attention_mask``, ``input_ids``. Prompts are padded on the
left; rows of padding, of the last token and of tool outputs are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import DTYPES
from moegeom.core.errors import RecordingError
from moegeom.tokens.foreign.npy_arrays import npz_rows, npz_shapes
from moegeom.tokens.foreign.tensor_file import open_tensor_file
from moegeom.tokens.rows import FileRows, Rows
from moegeom.tokens.traces.dialect import Dialect
from moegeom.tokens.traces.dialects._torch_file import has_keys, open_torch_file
from moegeom.tokens.traces.trace import (
    BEGINNING,
    PIECE_BYTES,
    TRACE_BYTES,
    Pieces,
    Place,
    RequestTrace,
    Trace,
    whole,
)

_IDS, _MASK, _TOKENS = "routed_experts", "attention_mask", "input_ids"


def recognises(path: Path) -> bool:
    """True for arrays in which one of four dimensions is called ``routed_experts``."""
    if path.suffix == ".npz" and path.is_file():
        return len(npz_shapes(path).get(_IDS) or ()) == 4
    if path.suffix == ".safetensors" and path.is_file():
        try:
            return _IDS in open_tensor_file(path).names
        except RecordingError:
            return False
    return has_keys(path, _IDS)


def read(path: Path) -> Trace:
    """Every sequence of the batch, with its mask if there is one."""
    return whole(pieces(path, BEGINNING))


def pieces(path: Path, place: Place) -> Pieces:
    """Sequences by pieces."""
    if path.suffix not in _READERS:
        raise RecordingError(
            f"{path.name}: expected one of {', '.join(_READERS)}.",
            "Save the tensors of the batch: np.savez, safetensors, or torch.save of a dictionary.",
        )
    arrays = _READERS[path.suffix](path)
    ids, mask, tokens = arrays.get(_IDS), arrays.get(_MASK), arrays.get(_TOKENS)
    if ids is None or len(ids.row_shape) != 3:
        found = "none" if ids is None else str((ids.num_rows, *ids.row_shape))
        raise RecordingError(
            f"{path.name}: {_IDS} has shape {found}; expected (sequences, tokens, layers, k)."
        )
    of_ids = (ids.num_rows, ids.row_shape[0])
    for name, beside in ((_MASK, mask), (_TOKENS, tokens)):
        if beside is not None and (found := (beside.num_rows, *beside.row_shape)) != of_ids:
            raise RecordingError(f"{path.name}: {name} has shape {found}; {_IDS} has {of_ids}.")
    if mask is None:
        # padded token ids without a mask say nothing about which are tokens
        tokens = None
    each = ids.width * ids.dtype.itemsize
    if each > TRACE_BYTES:
        raise RecordingError(
            f"{path.name}: {each:,} bytes of ids of one sequence, more than the {TRACE_BYTES:,} "
            "allowed.",
            "Cut the padding behind the longest sequence.",
        )
    return _sequences(path, ids, mask, tokens, range(place[0], ids.num_rows, _step(each)))


def _step(each: int) -> int:
    return max(1, PIECE_BYTES // max(each, 1))


def _sequences(
    path: Path, ids: Rows, mask: Rows | None, tokens: Rows | None, starts: range
) -> Pieces:
    for start in starts or (starts.start,):
        stop = min(start + starts.step, ids.num_rows)
        read = _read(ids, start, stop)
        is_token = None if mask is None else _read(mask, start, stop) != 0
        token_ids = None if tokens is None else _read(tokens, start, stop)
        requests = [
            RequestTrace(
                str(start + number),
                read[number],
                token_ids=None if token_ids is None else token_ids[number],
                mask=None if is_token is None else is_token[number],
                is_place=True,
            )
            for number in range(len(read))
        ]
        yield (
            Trace(path.name, "verl", tuple(requests)),
            ((stop, 0) if stop < ids.num_rows else None),
        )


def _read(rows: Rows, start: int, stop: int) -> np.ndarray:
    out = np.empty((max(stop - start, 0), rows.width), rows.dtype)
    rows.read_into(start, out)
    return out.reshape(len(out), *rows.row_shape)


def _npz(path: Path) -> dict[str, Rows]:
    return npz_rows(path, (_IDS, _MASK, _TOKENS))


def _safetensors(path: Path) -> dict[str, Rows]:
    opened = open_tensor_file(path)
    found: dict[str, Rows] = {}
    for name in (_IDS, _MASK, _TOKENS):
        if name in opened.names:
            info = opened.file.info(name)
            known = DTYPES.get(info.dtype)
            if known is None or known.numpy is None or known.numpy.kind not in "iub":
                raise RecordingError(f"{path.name}: {name} is {info.dtype}; expected integers.")
            shape = info.shape or (0,)
            found[name] = FileRows(path, info.offset, known.numpy, shape[0], tuple(shape[1:]))
    return found


def _torch(path: Path) -> dict[str, Rows]:
    file = open_torch_file(path)
    root: Any = file.root
    if not isinstance(root, dict):
        raise RecordingError(f"{path.name}: holds {type(root).__name__}; expected a dictionary.")
    return {
        name: file.rows(root[name], f"{path.name}: {name}")
        for name in (_IDS, _MASK, _TOKENS)
        if name in root
    }


_READERS: Mapping[str, Callable[[Path], dict[str, Rows]]] = {
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".pt": _torch,
    ".pth": _torch,
}

DIALECT = Dialect(
    name="verl",
    versions="verl 0.9.1",
    source="verl/experimental/agent_loop/agent_loop.py (routed_experts)",
    recognises=recognises,
    read=read,
    pieces=pieces,
)
