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
from moegeom.tokens.foreign.npy_arrays import npz_shapes, read_npz
from moegeom.tokens.foreign.tensor_file import open_tensor_file
from moegeom.tokens.traces.dialect import Dialect
from moegeom.tokens.traces.dialects._torch_file import has_keys, open_torch_file
from moegeom.tokens.traces.trace import TRACE_BYTES, RequestTrace, Trace

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
    if path.suffix not in _READERS:
        raise RecordingError(
            f"{path.name}: expected one of {', '.join(_READERS)}.",
            "Save the tensors of the batch: np.savez, safetensors, or torch.save of a dictionary.",
        )
    arrays = _READERS[path.suffix](path)
    ids, mask, tokens = arrays.get(_IDS), arrays.get(_MASK), arrays.get(_TOKENS)
    if ids is None or ids.ndim != 4:
        found = "none" if ids is None else str(ids.shape)
        raise RecordingError(
            f"{path.name}: {_IDS} has shape {found}; expected (sequences, tokens, layers, k)."
        )
    for name, beside in ((_MASK, mask), (_TOKENS, tokens)):
        if beside is not None and beside.shape != ids.shape[:2]:
            raise RecordingError(
                f"{path.name}: {name} has shape {beside.shape}; {_IDS} has {ids.shape[:2]}."
            )
    if tokens is not None and mask is None:
        # padded token ids without a mask say nothing about which are tokens
        tokens = None
    return Trace(
        path.name,
        "verl",
        tuple(
            RequestTrace(
                str(number),
                ids[number],
                token_ids=None if tokens is None else tokens[number],
                mask=None if mask is None else mask[number] != 0,
            )
            for number in range(len(ids))
        ),
    )


def _safetensors(path: Path) -> dict[str, np.ndarray]:
    opened = open_tensor_file(path)
    arrays = {}
    for name in (_IDS, _MASK, _TOKENS):
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


def _torch(path: Path) -> dict[str, np.ndarray]:
    file = open_torch_file(path)
    root: Any = file.root
    if not isinstance(root, dict):
        raise RecordingError(f"{path.name}: holds {type(root).__name__}; expected a dictionary.")
    return {
        name: file.array(root[name], f"{path.name}: {name}")
        for name in (_IDS, _MASK, _TOKENS)
        if name in root
    }


_READERS: Mapping[str, Callable[[Path], dict[str, np.ndarray]]] = {
    ".npz": read_npz,
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
)
