"""Sums over tokens of attention, recorded in a folder of two files.

``attention.json`` says of which checkpoint and layers, ``attention.safetensors`` has the sums.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from moegeom.checkpoint.formats.safetensors import SafetensorsFile
from moegeom.checkpoint.reading import CountingFile, ReadLog
from moegeom.core.documents import parse_json, record_of, refused_as
from moegeom.core.errors import RecordingError
from moegeom.core.files import read_regular, reading, write_whole, writing
from moegeom.core.limits import ATTENTION_HEADS, ATTENTION_LAYERS, ATTENTION_WIDTH, MOST_JSON
from moegeom.core.shapes import Float64, Int64
from moegeom.core.text import quoted
from moegeom.geometry.attention_heads import SUMS
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.tokens.rows import as_recording_error

FACTS_FILE, SUMS_FILE = "attention.json", "attention.safetensors"

SCHEMA = 1

#: Bins of the histograms: what is in front of a gate's function, by eighths from -16 on; what is
#: beyond is in the first and in the last.
NUM_BINS, BINS_PER_UNIT = 256, 8

#: What sums of squares of float32 over any number of tokens stay below; its square is a float64.
_LARGEST = 1e150

_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Width = Annotated[int, Meta(ge=0, le=ATTENTION_WIDTH)]


class _Version(Struct):
    schema: int
    sums: tuple[str, ...]


class _Layer(Struct):
    name: str
    has_heads: bool
    has_weights: bool
    has_places: bool
    fingerprint: str
    heads: Annotated[int, Meta(ge=1, le=ATTENTION_HEADS)]
    channels: _Width
    width: _Width


class _Facts(Struct):
    checkpoint: str
    engine: str
    num_tokens: _Count
    num_documents: _Count
    layers: Annotated[list[_Layer], Meta(min_length=1, max_length=ATTENTION_LAYERS)]


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


_FACTS = ("name", "has_heads", "has_weights", "has_places", "fingerprint")
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
            {name: getattr(layer, name) for name in _FACTS}
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
    with refused_as(RecordingError, where):
        document = parse_json(raw)
        version = record_of(_Version, document)
        if version.schema != SCHEMA or version.sums != SUMS:
            raise RecordingError(
                f"{where}: schema {version.schema} with {len(version.sums)} sums; this moegeom "
                f"reads schema {SCHEMA} with {len(SUMS)}.",
                "Record it again with this version.",
            )
        facts = record_of(_Facts, document)
    file = SafetensorsFile(CountingFile(path / SUMS_FILE, f"{path.name}/{SUMS_FILE}", ReadLog()))
    with as_recording_error(), reading(path / SUMS_FILE, RecordingError):
        layers = tuple(_layer(file, one) for one in facts.layers)
    if len({layer.name for layer in layers}) < len(layers):
        raise RecordingError(f"{where}: a layer stands in it twice.")
    of_run = (facts.checkpoint, facts.engine, facts.num_tokens, facts.num_documents)
    return AttentionRecord(path.resolve().name, *of_run, layers)


def _layer(file: SafetensorsFile, layer: _Layer) -> LayerSums:
    heads, channels, width = layer.heads, layer.channels, layer.width
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": (NUM_BLOCKS,),
        "queries": (NUM_BLOCKS,),
        "sums": (len(SUMS), NUM_BLOCKS, heads),
        "histogram": (2, heads, NUM_BINS),
        "rows": (2, 2, heads, channels),
        "input_sum": (width,),
    }
    arrays: dict[str, Any] = {
        key: _array(file, f"{layer.name}.{key}", shape) for key, shape in shapes.items()
    }
    return LayerSums(**{name: getattr(layer, name) for name in _FACTS}, **arrays)


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
