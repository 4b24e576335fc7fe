"""Tokens of batches, whose sequences nobody wrote down: Megatron-LM.

Megatron-LM writes with ``--moe-routing-trace-path`` a line of JSON for each step, layer and
microbatch. A line has no token ids and no requests: tokens of a batch, in its order. In training
layers count from 0, in inference with replay from 1. Activation recomputation writes a line twice,
ranks of tensor parallelism write the same lines, and ranks of a pipeline count their own layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from moegeom.core.errors import RecordingError
from moegeom.core.shapes import Integer
from moegeom.core.text import quoted
from moegeom.tokens.traces.dialects._text import Number, json_records, nested_ids
from moegeom.tokens.traces.trace import (
    BEGINNING,
    PIECE_BYTES,
    Dialect,
    Pieces,
    Place,
    RequestTrace,
    Trace,
    counted_notes,
)

# ------------------------------------------------------------------------------------ Megatron-LM

_RANKS = "router_trace_rank*.jsonl"

#: (step, microbatch) to ids by layer.
_Batches = dict[tuple[int, int], dict[int, Integer[np.ndarray, "tokens slots"]]]


class _RoutedLine(Struct):
    """The choices of a step at a layer."""

    step: Number
    layer: Number
    num_tokens: Number
    topk: Number
    top_indices: Any

    def ids(self, where: str) -> Integer[np.ndarray, "tokens slots"]:
        ids = nested_ids(self.top_indices, f"{where}: top_indices")
        shape = (self.num_tokens, self.topk)
        if ids.shape != shape:
            raise RecordingError(
                f"{where}: top_indices has shape {ids.shape}; the line says {quoted(shape)} "
                "(tokens, experts)."
            )
        if np.abs(ids).max(initial=0) >= 2**31:
            raise RecordingError(f"{where}: ids up to {ids.max()}; expected numbers of experts.")
        return ids.astype(np.int32)


def is_routing_trace(path: Path) -> bool:
    """True for a folder with such files, and for one of them."""
    if path.is_dir():
        return not (path / "recording.json").exists() and any(path.glob(_RANKS))
    return path.is_file() and path.match(_RANKS)


def files_of_ranks(folder: Path) -> list[Path]:
    """The files of all ranks, in their order."""
    return sorted(folder.glob(_RANKS), key=_rank)


def read_routing_trace(path: Path, place: Place) -> Pieces:
    """Microbatches by pieces of whole steps, where each step stands in one run of lines."""
    steps, size = _Steps(path), 0
    for record in json_records(path, place):
        if record.value.get("block", "decoder") != "decoder":
            steps.num_other_blocks += 1
            continue
        line = record.of(_RoutedLine)
        if size >= PIECE_BYTES and steps.is_new(line.step) and record.place != BEGINNING:
            yield steps.trace(), record.place
            steps, size = _Steps(path, steps.last), 0
        ids = line.ids(record.where)
        steps.add(line.step, line.layer, ids, record.where)
        size += ids.nbytes
    yield steps.trace(), None


class _Steps:
    """Lines of some steps; the nth line of a step and layer belongs to its nth microbatch."""

    def __init__(self, path: Path, before: int = -1) -> None:
        self._path, self._before = path, before
        self._lines: dict[tuple[int, int], list[np.ndarray]] = {}
        self._steps: set[int] = set()
        self._num_recomputed = self.num_other_blocks = 0

    @property
    def last(self) -> int:
        """The highest step up to here."""
        return max((self._before, *self._steps))

    def is_new(self, step: int) -> bool:
        """Whether no line of this step was read."""
        return step not in self._steps

    def add(
        self, step: int, layer: int, ids: Integer[np.ndarray, "tokens slots"], where: str
    ) -> None:
        """One line; RecordingError for one of a step that an earlier piece holds."""
        if step <= self._before:
            raise RecordingError(
                f"{where}: step {step} behind step {self._before}; a file of more than "
                f"{PIECE_BYTES:,} bytes of ids is read step by step.",
                "Sort its lines by step, or cut it into several files.",
            )
        self._steps.add(step)
        lines = self._lines.setdefault((step, layer), [])
        if any(np.array_equal(ids, before) for before in lines):
            self._num_recomputed += 1
        else:
            lines.append(ids)

    def trace(self) -> Trace:
        """A request for each microbatch."""
        batches: _Batches = {}
        for (step, layer), lines in self._lines.items():
            for number, ids in enumerate(lines):
                batches.setdefault((step, number), {})[layer] = ids
        layers = _common_layers(batches, self._path.name) if batches else None
        counts = {
            "lines written twice by recomputation, left out": self._num_recomputed,
            "lines of prediction heads (mtp), left out": self.num_other_blocks,
        }
        return Trace(
            self._path.name,
            "Megatron-LM",
            tuple(
                RequestTrace(
                    f"{_rank(self._path)}/{step}/{number}",
                    _stacked(batch, layers or (), self._path.name, step),
                    batch=f"{step}/{number}",
                )
                for (step, number), batch in batches.items()
            ),
            layers=layers,
            ids_are="logical",
            has_documents=False,
            notes=counted_notes(counts),
        )


def _common_layers(batches: _Batches, name: str) -> tuple[int, ...]:
    """The layers of every microbatch, which must be the same."""
    layers = sorted({tuple(sorted(batch)) for batch in batches.values()})
    if len(layers) != 1:
        raise RecordingError(
            f"{name}: microbatches have {len(layers)} different sets of layers ({_some(layers)}).",
            "A line is missing (dropped or padded tokens are not traced), the run was cut off, or "
            "ranks are of different stages of a pipeline.",
        )
    return layers[0]


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


def _some(values: Sequence[Any]) -> str:
    return "; ".join(json.dumps(list(item)[:8]) for item in values[:3])


def _rank(file: Path) -> int:
    digits = file.stem.removeprefix("router_trace_rank")
    return int(digits) if digits.isdecimal() and len(digits) < 10 else -1


MEGATRON = Dialect(
    name="megatron",
    versions="Megatron-LM d98e8a64dd (2026-08-22)",
    source="megatron/core/transformer/moe/router_trace.py; PR 5220",
    recognises=is_routing_trace,
    pieces=read_routing_trace,
    files=files_of_ranks,
    copies="ranks with the same lines as another, left out",
)
