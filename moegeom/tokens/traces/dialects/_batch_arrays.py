"""Arrays of a padded batch by name: npz, safetensors, or a dictionary that ``torch.save`` wrote.

They are read by ranges of sequences, so that a file may be of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from moegeom.checkpoint.dtypes import DTYPES
from moegeom.core.errors import RecordingError
from moegeom.core.limits import TRACE_BYTES
from moegeom.tokens.foreign.npy_arrays import npz_rows, npz_shapes
from moegeom.tokens.foreign.tensor_file import open_tensor_file
from moegeom.tokens.rows import FileRows, Rows
from moegeom.tokens.traces.dialects._torch_file import has_keys, open_torch_file
from moegeom.tokens.traces.trace import PIECE_BYTES

#: What trainers call the ids of a batch, (sequences, tokens, layers, k).
IDS = "routed_experts"


def holds_ids(path: Path, *beside: str) -> bool:
    """Whether a file holds such ids, and every array of ``beside``."""
    if path.suffix == ".npz" and path.is_file():
        shapes = npz_shapes(path)
        return len(shapes.get(IDS) or ()) == 4 and set(beside) <= set(shapes)
    if path.suffix == ".safetensors" and path.is_file():
        try:
            return {IDS, *beside} <= set(open_tensor_file(path).names)
        except RecordingError:
            return False
    return has_keys(path, IDS, *beside)


def batch_rows(path: Path, names: Collection[str], masks: Collection[str]) -> dict[str, Rows]:
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
    arrays = _READERS[path.suffix](path, (IDS, *names), masks)
    ids = arrays.get(IDS)
    if ids is None or len(ids.row_shape) != 3:
        found = "none" if ids is None else str(shape_of(ids))
        raise RecordingError(
            f"{path.name}: {IDS} has shape {found}; expected (sequences, tokens, layers, k)."
        )
    return arrays


def shape_of(rows: Rows) -> tuple[int, ...]:
    """The shape of the whole array."""
    return (rows.num_rows, *rows.row_shape)


def refuse_other_shape(
    path: Path, arrays: Mapping[str, Rows], name: str, expected: tuple[int, ...]
) -> None:
    """Raises RecordingError where an array that is there has another shape than the ids ask for."""
    found = arrays.get(name)
    if found is not None and shape_of(found) != expected:
        raise RecordingError(
            f"{path.name}: {name} has shape {shape_of(found)}; {IDS} has {expected}."
        )


def read_rows(rows: Rows, start: int, stop: int) -> Shaped[np.ndarray, "sequences *row"]:
    """Rows ``[start, stop)`` in memory, as stored."""
    out = np.empty((max(stop - start, 0), rows.width), rows.dtype)
    rows.read_into(start, out)
    return out.reshape(len(out), *rows.row_shape)


def ranges_of(path: Path, ids: Rows, first: int) -> Iterator[tuple[int, int]]:
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


def _npz(path: Path, names: Collection[str], masks: Collection[str]) -> dict[str, Rows]:
    return npz_rows(path, names, masks)


def _safetensors(path: Path, names: Collection[str], masks: Collection[str]) -> dict[str, Rows]:
    opened = open_tensor_file(path)
    found: dict[str, Rows] = {}
    for name in (*names, *masks):
        if name in opened.names:
            info = opened.file.info(name)
            known = DTYPES.get(info.dtype)
            if known is None or known.numpy is None or known.numpy.kind not in "iub":
                raise RecordingError(f"{path.name}: {name} is {info.dtype}; expected integers.")
            shape = info.shape or (0,)
            found[name] = FileRows(path, info.offset, known.numpy, shape[0], tuple(shape[1:]))
    return found


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
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".pt": _torch,
    ".pth": _torch,
}
