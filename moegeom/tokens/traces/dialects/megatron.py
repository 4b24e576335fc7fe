"""Megatron-LM: routing traces, and counts of tokens by expert.

``--moe-routing-trace-path`` writes a line of JSON for each step, layer and microbatch. A line has
no token ids and no requests: tokens of a batch, in its order. In training layers count from 0, in
inference with replay from 1. Activation recomputation writes a line twice, ranks of tensor
parallelism write the same lines, and ranks of a pipeline count their own layers.

``--save-tokens-per-expert-interval`` writes counts by iteration, layer and microbatch:
``tokens_per_expert/rank0.jsonl`` counts the experts of its own rank, behind the dispatch. Which
experts those are is not written: with expert parallelism the ranks cannot be put together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.limits import EXPERT_COUNT, TRACE_BYTES
from moegeom.core.shapes import Int64, Integer
from moegeom.core.text import quoted
from moegeom.tokens.traces.dialects._json import json_records, nested_ids, shows, whole_number
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

_FILES = "router_trace_rank*.jsonl"

#: (step, microbatch) to ids by layer.
_Batches = dict[tuple[int, int], dict[int, Integer[np.ndarray, "tokens slots"]]]


def is_routing_trace(path: Path) -> bool:
    """True for a folder with such files, and for one of them."""
    if path.is_dir():
        return not (path / "recording.json").exists() and any(path.glob(_FILES))
    return path.is_file() and path.match(_FILES)


def files_of(folder: Path) -> list[Path]:
    """The files of all ranks, in their order."""
    return sorted(folder.glob(_FILES), key=_rank)


def pieces(path: Path, place: Place) -> Pieces:
    """Microbatches by pieces of whole steps, where each step stands in one run of lines."""
    steps = _Steps(path)
    size, begun = 0, place
    for record in json_records(path, place):
        line, where = record.value, record.where
        block = line.get("block", "decoder")
        if block != "decoder":
            steps.num_other_blocks += 1
            begun = record.following
            continue
        step = whole_number(line, "step", where)
        if size >= PIECE_BYTES and steps.is_new(step) and begun != BEGINNING:
            yield steps.trace(), begun
            steps, size = _Steps(path, steps.last), 0
        ids = _ids(line, where)
        steps.add(step, whole_number(line, "layer", where), ids, where)
        size += ids.nbytes
        begun = record.following
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


DIALECT = Dialect(
    name="megatron",
    versions="Megatron-LM d98e8a64dd (2026-08-22)",
    source="megatron/core/transformer/moe/router_trace.py; PR 5220",
    recognises=is_routing_trace,
    pieces=pieces,
    files=files_of,
    copies="ranks with the same lines as another, left out",
)


# ----------------------------------------------------------------------------- tokens by expert


def read_counts(path: Path) -> Trace:
    """One step for each iteration, its microbatches added up."""
    steps: dict[int, dict[int, Int64[np.ndarray, "experts"]]] = {}
    others = 0
    for record in json_records(path):
        where, line = record.where, record.value
        if line.get("block", "decoder") != "decoder":
            others += 1
            continue
        step, layer, counts = (
            whole_number(line, "iter", where),
            whole_number(line, "layer", where),
            _counts(line, where),
        )
        if layer in steps.setdefault(step, {}):
            raise RecordingError(f"{where}: layer {layer} of iteration {step} stands twice.")
        steps[step][layer] = counts
    shapes = {
        (tuple(sorted(of_step)), frozenset(len(c) for c in of_step.values()))
        for of_step in steps.values()
    }
    if len(shapes) != 1 or len(next(iter(shapes))[1]) != 1:
        raise RecordingError(
            f"{path.name}: {len(steps)} iterations with {len(shapes)} different sets of layers and "
            "experts; expected one.",
            "The file was cut off, or is of several runs.",
        )
    layers, (num_experts,) = next(iter(shapes))
    if len(steps) * len(layers) * num_experts * 8 > TRACE_BYTES:
        raise RecordingError(f"{path.name}: more than {TRACE_BYTES:,} bytes of counts.")
    counts = np.stack([np.stack([steps[s][layer] for layer in layers]) for s in sorted(steps)])
    return Trace(
        path.name,
        "Megatron-LM (one rank, behind the dispatch)",
        counts=counts,
        layers=layers,
        ids_are="logical",
        notes=counted_notes({"lines of prediction heads (mtp), left out": others}),
    )


def _counts(line: Mapping[str, Any], where: str) -> Int64[np.ndarray, "experts"]:
    counts = nested_ids(line.get("tpe"), f"{where}: tpe")
    if counts.ndim != 2 or not counts.size or counts.min() < 0 or counts.max() > EXPERT_COUNT:
        raise RecordingError(
            f"{where}: tpe has shape {counts.shape}; expected counts (microbatches, experts)."
        )
    return counts.astype(np.int64).sum(axis=0)


COUNTS = Dialect(
    name="megatron_counts",
    versions="Megatron-LM d98e8a64dd (2026-08-22)",
    source="megatron/core/transformer/moe (tokens per expert); PR 3842",
    recognises=lambda path: shows(path, rb'"iter"\s{0,9}:', rb'"layer"\s{0,9}:', rb'"tpe"\s{0,9}:'),
    read=read_counts,
)
