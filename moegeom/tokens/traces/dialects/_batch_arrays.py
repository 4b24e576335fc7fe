"""Arrays of a padded batch by name: npz, safetensors, or a dictionary that ``torch.save`` wrote."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.checkpoint.dtypes import DTYPES
from moegeom.core.errors import RecordingError
from moegeom.tokens.foreign.npy_arrays import npz_shapes, read_numbers
from moegeom.tokens.foreign.tensor_file import open_tensor_file
from moegeom.tokens.traces.dialects._torch_file import has_keys, open_torch_file
from moegeom.tokens.traces.trace import TRACE_BYTES

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


def batch_arrays(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Those of the arrays ``names`` that the file holds, and the ids, which it must hold.

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
    arrays = _READERS[path.suffix](path, (IDS, *names))
    ids = arrays.get(IDS)
    if ids is None or ids.ndim != 4:
        found = "none" if ids is None else str(ids.shape)
        raise RecordingError(
            f"{path.name}: {IDS} has shape {found}; expected (sequences, tokens, layers, k)."
        )
    return arrays


def refuse_other_shape(
    path: Path, arrays: Mapping[str, np.ndarray], name: str, expected: tuple[int, ...]
) -> None:
    """Raises RecordingError where an array that is there has another shape than the ids ask for."""
    found = arrays.get(name)
    if found is not None and found.shape != expected:
        raise RecordingError(f"{path.name}: {name} has shape {found.shape}; {IDS} has {expected}.")


def _npz(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    arrays = {name: array for name, array in read_numbers(path).items() if name in names}
    for name, array in arrays.items():
        if array.dtype.kind not in "iub" and not name.endswith("mask"):
            raise RecordingError(f"{path.name}: {name} is {array.dtype}; expected integers.")
    return arrays


def _safetensors(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    opened = open_tensor_file(path)
    arrays = {}
    for name in names:
        if name in opened.names:
            info = opened.file.info(name)
            known = DTYPES.get(info.dtype)
            if known is None or known.numpy is None or known.numpy.kind not in "iub":
                raise RecordingError(f"{path.name}: {name} is {info.dtype}; expected integers.")
            if info.size_bytes > TRACE_BYTES:
                raise RecordingError(
                    f"{path.name}: {name} has {info.size_bytes:,} bytes, more than the "
                    f"{TRACE_BYTES:,} allowed.",
                    "Give the sequences in several files.",
                )
            arrays[name] = opened.file.read(name)
    return arrays


def _torch(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    file = open_torch_file(path)
    root: Any = file.root
    if not isinstance(root, dict):
        raise RecordingError(f"{path.name}: holds {type(root).__name__}; expected a dictionary.")
    return {name: file.array(root[name], f"{path.name}: {name}") for name in names if name in root}


_READERS: Mapping[str, Callable[[Path, Collection[str]], dict[str, np.ndarray]]] = {
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".pt": _torch,
    ".pth": _torch,
}
