"""llama.cpp, ``llama-imatrix``: how often each expert was chosen, beside its activations.

``blk.N.ffn_gate_exps.weight.counts`` holds, for each expert, the number of (token, slot) pairs
that were sent to it, as float32: exact below 2^24. Files converted from the older ``.dat`` hold
one number for all experts, which is no count of any.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from moegeom.checkpoint.formats.gguf import GgufFile
from moegeom.checkpoint.reading import CountingFile, ReadLog
from moegeom.core.errors import CheckpointError, RecordingError
from moegeom.tokens.traces.trace import Dialect, Trace

_COUNTS = re.compile(r"blk\.(\d{1,4})\.ffn_(?:gate|up|down|gate_up)_exps\.weight\.counts")

#: From here on float32 holds even numbers only.
_EXACT = 2**24

_MOST_EXPERTS = 65_536


def recognises(path: Path) -> bool:
    """True for a GGUF file that calls itself an importance matrix."""
    if path.suffix != ".gguf" or not path.is_file():
        return False
    try:
        return _open(path).header.settings.get("general.type") == "imatrix"
    except CheckpointError:
        return False


def read(path: Path) -> Trace:
    """One step of counts by layer and expert."""
    file = _open(path)
    by_layer: dict[int, np.ndarray] = {}
    for name in sorted(file.names()):
        found = _COUNTS.fullmatch(name)
        if found is None:
            continue
        layer, counts = int(found[1]), _counts(file, name, path.name)
        if not np.array_equal(by_layer.setdefault(layer, counts), counts):
            raise RecordingError(
                f"{path.name}: the counts of the matrices of layer {layer} differ.",
                "They count the same tokens; was the file put together from several?",
            )
    if not by_layer:
        raise RecordingError(f"{path.name}: holds no counts of experts: a model without experts.")
    layers = tuple(sorted(by_layer))
    counts = [by_layer[layer] for layer in layers]
    if len({len(of_layer) for of_layer in counts}) > 1:
        raise RecordingError(f"{path.name}: layers have different numbers of experts.")
    if all(len(np.unique(of_layer)) == 1 for of_layer in counts):
        raise RecordingError(
            f"{path.name}: every expert has {int(counts[0][0]):,} in every layer: converted from "
            "an older file, which did not count.",
            "Run llama-imatrix anew and write GGUF.",
        )
    inexact = sum(int((of_layer >= _EXACT).sum()) for of_layer in counts)
    note = f"counts beyond 2^24, which are rounded: {inexact:,}"
    return Trace(
        path.name,
        "llama-imatrix",
        counts=np.stack(counts)[None],
        layers=layers,
        ids_are="logical",
        notes=(note,) if inexact else (),
    )


def _counts(file: GgufFile, name: str, where: str) -> np.ndarray:
    info = file.info(name)
    if info.dtype != "F32" or len(info.shape) != 2 or info.shape[1] != 1:
        raise RecordingError(
            f"{where}: {name} is {info.dtype} of shape {info.shape}; expected F32 (experts, 1)."
        )
    if not 2 <= info.shape[0] <= _MOST_EXPERTS:
        raise RecordingError(f"{where}: {name} counts {info.shape[0]} experts.")
    with np.errstate(invalid="ignore"):  # a signalling nan is none of the counts either
        found = file.read(name)[:, 0].astype(np.float64)
    if not np.isfinite(found).all() or (found < 0).any() or (found != np.rint(found)).any():
        raise RecordingError(
            f"{where}: {name} holds {found.min():g} to {found.max():g}, no counts."
        )
    if found.max() >= 2**62:
        raise RecordingError(f"{where}: {name} counts up to {found.max():g}.")
    return found.astype(np.int64)


def _open(path: Path) -> GgufFile:
    return GgufFile(CountingFile(path, path.name, ReadLog()))


DIALECT = Dialect(
    name="llama_imatrix",
    versions="GGUF since PR 9400 (2025)",
    source="llama.cpp tools/imatrix/imatrix.cpp, 006e7ef991",
    recognises=recognises,
    read=read,
)
