"""Sums over tokens of attention, recorded in a folder of two files.

``attention.json`` says of which checkpoint and layers, ``attention.safetensors`` has the sums.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from moegeom.checkpoint.formats.safetensors import SafetensorsFile
from moegeom.checkpoint.reading import CountingFile, ReadLog
from moegeom.core.documents import DocumentError, parse_json
from moegeom.core.errors import CheckpointError, RecordingError
from moegeom.core.files import read_regular, reading, write_whole, writing
from moegeom.core.limits import ATTENTION_HEADS, ATTENTION_LAYERS, ATTENTION_WIDTH, MOST_JSON
from moegeom.core.text import number_of, quoted
from moegeom.geometry.gating import SUMS
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.tokens.recording.fields import Fields

FACTS_FILE, SUMS_FILE = "attention.json", "attention.safetensors"

SCHEMA = 1

#: Bins of the histograms: what is in front of a gate's function, by eighths from -16 on; what is
#: beyond is in the first and in the last.
NUM_BINS, BINS_PER_UNIT = 256, 8

#: What sums of squares of float32 over any number of tokens stay below; its square is a float64.
_LARGEST = 1e150


@dataclass(frozen=True, eq=False)
class LayerSums:
    """One layer. ``sums`` are those of ``geometry.gating.SUMS``.

    ``histogram`` and ``rows`` are of its gate and of random rows of the same lengths; ``rows``
    adds up what stands before the gate's function, and its square. Without a gate there are no
    channels. ``has_heads``: what heads give was seen; ``has_weights``: what attention they pay was,
    and with ``has_places`` to which tokens.
    ``fingerprint`` is that of gate and sinks.
    """

    name: str
    has_heads: bool
    has_weights: bool
    has_places: bool
    fingerprint: str
    tokens: Int64[np.ndarray, "blocks"]
    queries: Int64[np.ndarray, "blocks"]
    sums: Float64[np.ndarray, "sums blocks heads"]
    histogram: Int64[np.ndarray, "2 heads bins"]
    rows: Float64[np.ndarray, "2 2 heads channels"]
    input_sum: Float64[np.ndarray, "width"]

    @property
    def by_name(self) -> dict[str, Float64[np.ndarray, "blocks heads"]]:
        """The sums by their names."""
        return dict(zip(SUMS, self.sums, strict=True))


@dataclass(frozen=True, eq=False)
class AttentionRecord:
    """All layers; ``label`` is the name to print."""

    label: str
    checkpoint: str
    engine: str
    num_tokens: int
    num_documents: int
    layers: tuple[LayerSums, ...]


_ARRAYS = ("tokens", "queries", "sums", "histogram", "rows", "input_sum")


def is_attention_record(path: Path) -> bool:
    """Whether the folder holds an attention record."""
    return (path / FACTS_FILE).is_file()


def write_attention_record(folder: Path, record: AttentionRecord) -> None:
    """Writes both files into a folder that is there; equal records give equal bytes."""
    from safetensors.numpy import save_file

    tensors = {
        f"{layer.name}.{name}": np.ascontiguousarray(getattr(layer, name))
        for layer in record.layers
        for name in _ARRAYS
    }
    facts = {
        "schema": SCHEMA,
        "checkpoint": record.checkpoint,
        "engine": record.engine,
        "num_tokens": record.num_tokens,
        "num_documents": record.num_documents,
        "sums": list(SUMS),
        "layers": [
            {f.name: getattr(layer, f.name) for f in fields(layer) if f.name not in _ARRAYS}
            | {
                "heads": layer.sums.shape[2],
                "channels": layer.rows.shape[3],
                "width": len(layer.input_sum),
            }
            for layer in record.layers
        ],
    }
    with writing(folder / SUMS_FILE):
        save_file(tensors, folder / SUMS_FILE)
    write_whole(
        folder / FACTS_FILE, json.dumps(facts, indent=1, ensure_ascii=False).encode() + b"\n"
    )


def read_attention_record(path: Path) -> AttentionRecord:
    """The attention record in an untrusted folder.

    Raises
    ------
    RecordingError
        When it is none, is damaged, or is one of another version.
    """
    if not is_attention_record(path):
        raise RecordingError(
            f"{path.name} has no {FACTS_FILE}: nothing of attention was recorded in it.",
            "Recordings for scans hold what routers read. Record attention with "
            "moegeom capture CKPT --text FILE --keep attention --out REC.",
        )
    where = f"{path.name}/{FACTS_FILE}"
    with reading(path / FACTS_FILE, RecordingError):
        raw = read_regular(path / FACTS_FILE, MOST_JSON, follows=True)
    try:
        facts = Fields(parse_json(raw), where)
    except DocumentError as error:
        raise RecordingError(f"{where}: {error}.") from None
    if (schema := facts.number("schema")) != SCHEMA or facts.texts("sums") != SUMS:
        raise RecordingError(
            f"{where}: schema {schema} with {len(facts.texts('sums'))} sums; this moegeom reads "
            f"schema {SCHEMA} with {len(SUMS)}.",
            "Record it again with this version.",
        )
    listed = facts.list("layers")
    if not 0 < len(listed) <= ATTENTION_LAYERS:
        raise RecordingError(
            f"{where}: lists {number_of(len(listed), 'layer')}, expected 1 to {ATTENTION_LAYERS:,}."
        )
    file = SafetensorsFile(CountingFile(path / SUMS_FILE, f"{path.name}/{SUMS_FILE}", ReadLog()))
    try:
        with reading(path / SUMS_FILE, RecordingError):
            layers = tuple(_layer(file, Fields(one, f"{where}: layer")) for one in listed)
    except CheckpointError as error:
        raise RecordingError(error.message, error.hint) from None
    if len({layer.name for layer in layers}) < len(layers):
        raise RecordingError(f"{where}: a layer stands in it twice.")
    return AttentionRecord(
        path.resolve().name,
        facts.text("checkpoint"),
        facts.text("engine"),
        facts.number("num_tokens"),
        facts.number("num_documents"),
        layers,
    )


def _layer(file: SafetensorsFile, facts: Fields) -> LayerSums:
    name = facts.text("name")
    heads, channels, width = map(facts.number, ("heads", "channels", "width"))
    if not (0 < heads <= ATTENTION_HEADS and max(channels, width) <= ATTENTION_WIDTH):
        raise RecordingError(
            f"{facts.where} {quoted(name)}: {heads} heads of {channels} channels that read {width}."
        )
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": (NUM_BLOCKS,),
        "queries": (NUM_BLOCKS,),
        "sums": (len(SUMS), NUM_BLOCKS, heads),
        "histogram": (2, heads, NUM_BINS),
        "rows": (2, 2, heads, channels),
        "input_sum": (width,),
    }
    arrays: dict[str, Any] = {
        key: _array(file, f"{name}.{key}", shape) for key, shape in shapes.items()
    }
    flags = {key: facts.flag(key) for key in ("has_heads", "has_weights", "has_places")}
    return LayerSums(name=name, fingerprint=facts.text("fingerprint"), **flags, **arrays)


def _array(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in file.names():
        raise RecordingError(f"{file.label}: tensor {quoted(name)} is missing.")
    info = file.info(name)
    expected = "I64" if name.endswith((".tokens", ".queries", ".histogram")) else "F64"
    if info.shape != shape or info.dtype != expected:
        raise RecordingError(
            f"{file.label}: tensor {quoted(name)} is {info.dtype} {info.shape}; expected "
            f"{expected} {shape}."
        )
    array = file.read(name)
    if (expected == "I64" and (array < 0).any()) or not (np.abs(array) < _LARGEST).all():
        raise RecordingError(
            f"{file.label}: tensor {quoted(name)} holds values that nothing adds up to."
        )
    return array
