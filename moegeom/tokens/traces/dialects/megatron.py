"""Megatron-LM, ``--moe-routing-trace-path``: a line of JSON for each step, layer and microbatch.

A line has no token ids and no requests: tokens of a batch, in its order. In training layers count
from 0, in inference with replay from 1. Activation recomputation writes a line twice, ranks of
tensor parallelism write the same lines, and ranks of a pipeline count their own layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from moegeom.core.errors import RecordingError
from moegeom.core.text import number_of, quoted
from moegeom.tokens.traces.dialect import Dialect
from moegeom.tokens.traces.dialects._encodings import nested_ids
from moegeom.tokens.traces.dialects._json_records import json_records, whole_number
from moegeom.tokens.traces.trace import TRACE_BYTES, RequestTrace, Trace

_FILES = "router_trace_rank*.jsonl"

#: Ranks of one run.
_MOST_FILES = 4096

#: (step, microbatch) to ids by layer.
_Batches = dict[tuple[int, int], dict[int, Integer[np.ndarray, "tokens slots"]]]


def recognises(path: Path) -> bool:
    """True for a folder with such files, and for one of them."""
    if path.is_dir():
        return not (path / "recording.json").exists() and any(path.glob(_FILES))
    return path.is_file() and path.match(_FILES)


def read(path: Path) -> Trace:
    """Every microbatch of every rank as a request, by rank and step."""
    files = sorted(path.glob(_FILES), key=_rank) if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    if not files or len(files) > _MOST_FILES or size > TRACE_BYTES:
        raise RecordingError(
            f"{path.name}: {number_of(len(files), 'file')} of {size:,} bytes; expected 1 to "
            f"{_MOST_FILES} files "
            f"of at most {TRACE_BYTES:,} bytes together.",
            "Trace fewer steps.",
        )
    told = _Counts()
    ranks = [_read_rank(file, told) for file in files]
    kept = _without_copies(ranks, told)
    layers = _common_layers(kept, files, path.name)
    requests = [
        RequestTrace(f"{_rank(file)}/{step}/{number}", _stacked(batch, layers, file.name, step))
        for file, batches in kept
        for (step, number), batch in batches.items()
    ]
    return Trace(
        path.name,
        "Megatron-LM",
        tuple(requests),
        layers=layers,
        ids_are="logical",
        has_documents=False,
        notes=told.notes(),
    )


class _Counts:
    """What was left out while reading."""

    def __init__(self) -> None:
        self.recomputed = self.other_blocks = self.copies = 0

    def notes(self) -> tuple[str, ...]:
        said = (
            (self.recomputed, "lines written twice by recomputation, left out"),
            (self.other_blocks, "lines of prediction heads (mtp), left out"),
            (self.copies, "ranks with the same lines as another, left out"),
        )
        return tuple(f"{text}: {count:,}" for count, text in said if count)


def _read_rank(file: Path, told: _Counts) -> tuple[Path, _Batches]:
    """Microbatches of one rank; the nth line of a step and layer belongs to its nth microbatch."""
    lines: dict[tuple[int, int], list[np.ndarray]] = {}
    for where, line in json_records(file):
        block = line.get("block", "decoder")
        if block != "decoder":
            told.other_blocks += 1
            continue
        step, layer, ids = (
            whole_number(line, "step", where),
            whole_number(line, "layer", where),
            _ids(line, where),
        )
        known = lines.setdefault((step, layer), [])
        if any(np.array_equal(ids, before) for before in known):
            told.recomputed += 1
        else:
            known.append(ids)
    batches: _Batches = {}
    for (step, layer), found in lines.items():
        for number, ids in enumerate(found):
            batches.setdefault((step, number), {})[layer] = ids
    return file, batches


def _ids(line: Mapping[str, Any], where: str) -> Integer[np.ndarray, "tokens slots"]:
    ids = nested_ids(line.get("top_indices"), f"{where}: top_indices")
    shape = (line.get("num_tokens"), line.get("topk"))
    if ids.ndim != 2 or ids.shape != shape:
        raise RecordingError(
            f"{where}: top_indices has shape {ids.shape}; the line says {quoted(shape)} (tokens, "
            "experts)."
        )
    if np.abs(ids).max(initial=0) >= 2**31:
        raise RecordingError(f"{where}: ids up to {ids.max()}; expected numbers of experts.")
    return ids.astype(np.int32)


def _without_copies(
    ranks: Sequence[tuple[Path, _Batches]], told: _Counts
) -> list[tuple[Path, _Batches]]:
    kept: list[tuple[Path, _Batches]] = []
    for file, batches in ranks:
        if any(_equal(batches, other) for _, other in kept):
            told.copies += 1
        else:
            kept.append((file, batches))
    return kept


def _equal(one: _Batches, other: _Batches) -> bool:
    return one.keys() == other.keys() and all(
        batch.keys() == other[key].keys()
        and all(np.array_equal(ids, other[key][layer]) for layer, ids in batch.items())
        for key, batch in one.items()
    )


def _common_layers(
    ranks: Sequence[tuple[Path, _Batches]], files: Sequence[Path], name: str
) -> tuple[int, ...]:
    """The layers of every microbatch of every rank, which must be the same."""
    found = sorted({tuple(sorted(batch)) for _, batches in ranks for batch in batches.values()})
    if len(found) != 1:
        raise RecordingError(
            f"{name}: microbatches of {len(files)} ranks have {len(found)} different sets of "
            f"layers ({_some(found)}).",
            "A line is missing (dropped or padded tokens are not traced), the run was cut off, or "
            "ranks are of different stages of a pipeline.",
        )
    return found[0]


def _stacked(
    batch: Mapping[int, np.ndarray], layers: Sequence[int], name: str, step: int
) -> Integer[np.ndarray, "tokens layers slots"]:
    shapes = {ids.shape for ids in batch.values()}
    if len(shapes) > 1:
        raise RecordingError(
            f"{name}: step {step} has {_some(sorted(shapes))} (tokens, experts) at its layers; "
            "expected the same at all of them."
        )
    return np.stack([batch[layer] for layer in layers], axis=1)


def _some(found: Sequence[Any]) -> str:
    return "; ".join(json.dumps(list(item)[:8]) for item in found[:3])


def _rank(file: Path) -> int:
    digits = file.stem.removeprefix("router_trace_rank")
    return int(digits) if digits.isdecimal() and len(digits) < 10 else -1


DIALECT = Dialect(
    name="megatron",
    versions="Megatron-LM d98e8a64dd (2026-08-22)",
    source="megatron/core/transformer/moe/router_trace.py; PR 5220",
    recognises=recognises,
    read=read,
)
