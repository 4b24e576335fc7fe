"""Counts of choices by expert, of no token by itself: SGLang, Megatron-LM, llama-imatrix.

SGLang's recorder dumps in its mode ``stat`` ``logical_count``, (steps, layers, experts), in a file
of ``torch.save``; the buffer is dumped whole, so steps that were not used are zeros. Ranks of
tensor parallelism are added up: shares are right, totals may be multiples. Mode ``per_token`` holds
physical ids without requests.

Megatron-LM writes with ``--save-tokens-per-expert-interval`` counts by iteration, layer and
microbatch: ``tokens_per_expert/rank0.jsonl`` counts the experts of its own rank, behind the
dispatch. Which experts those are is not written: with expert parallelism the ranks cannot be put
together.

``llama-imatrix`` counts how often each expert was chosen, beside its activations:
``blk.N.ffn_gate_exps.weight.counts`` holds, for each expert, the number of (token, slot) pairs that
were sent to it, as float32: exact below 2^24. Files converted from the older ``.dat`` hold one
number for all experts, which is no count of any.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from moegeom.checkpoint.formats.gguf import GgufFile
from moegeom.checkpoint.reading import CountingFile, ReadLog
from moegeom.core.errors import CheckpointError, RecordingError
from moegeom.core.limits import EXPERT_COUNT, TRACE_BYTES, TRACE_EXPERTS
from moegeom.core.shapes import Int64
from moegeom.tokens.traces.dialects._text import Number, json_records, nested_ids, shows
from moegeom.tokens.traces.dialects._torch_file import has_keys, open_torch_file
from moegeom.tokens.traces.trace import Dialect, Trace, counted_notes

# ----------------------------------------------------------------------------------------- SGLang

_COUNTS, _RECORDS = "logical_count", "records"


def is_recorded(path: Path) -> bool:
    """True for the dictionaries that the recorder dumps."""
    return has_keys(path, _COUNTS) or has_keys(path, _RECORDS, "last_physical_to_logical_map")


def recorded_counts(path: Path) -> Trace:
    """The counts; RecordingError for the other modes."""
    file = open_torch_file(path)
    root = file.root if isinstance(file.root, dict) else {}
    if _COUNTS not in root:
        raise RecordingError(
            f"{path.name}: records of single passes: physical ids of the tokens of a batch, "
            "without requests.",
            "Use return_routed_experts of the server, or the recorder's mode stat.",
        )
    counts = file.array(root[_COUNTS], f"{path.name}: {_COUNTS}")
    if counts.ndim != 3 or 0 in counts.shape or counts.min() < 0 or counts.max() > EXPERT_COUNT:
        raise RecordingError(
            f"{path.name}: {_COUNTS} has shape {counts.shape} and values from "
            f"{counts.min(initial=0)} to {counts.max(initial=0)}; expected counts (steps, layers, "
            "experts)."
        )
    used = counts.any(axis=(1, 2))
    if not used.any():
        raise RecordingError(f"{path.name}: every count is 0: nothing was recorded.")
    return Trace(
        path.name,
        "SGLang recorder",
        counts=counts[used].astype(np.int64),
        ids_are="logical",
        notes=counted_notes(
            {"steps of the buffer that were not used, left out": int((~used).sum())}
        ),
    )


RECORDER = Dialect(
    name="sglang_recorder",
    versions="0.5.23",
    source="sglang/srt/eplb/expert_distribution.py",
    recognises=is_recorded,
    read=recorded_counts,
)

# ------------------------------------------------------------------------------------ Megatron-LM


class _CountedLine(Struct):
    iter: Number
    layer: Number
    tpe: Any


def read_tokens_per_expert(path: Path) -> Trace:
    """One step for each iteration, its microbatches added up."""
    steps: dict[int, dict[int, Int64[np.ndarray, "experts"]]] = {}
    others = 0
    for record in json_records(path):
        if record.value.get("block", "decoder") != "decoder":
            others += 1
            continue
        line = record.of(_CountedLine)
        of_step = steps.setdefault(line.iter, {})
        if line.layer in of_step:
            raise RecordingError(
                f"{record.where}: layer {line.layer} of iteration {line.iter} stands twice."
            )
        of_step[line.layer] = _of_microbatches(line.tpe, record.where)
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


def _of_microbatches(tpe: Any, where: str) -> Int64[np.ndarray, "experts"]:
    """The counts of a line, its microbatches added up."""
    counts = nested_ids(tpe, f"{where}: tpe")
    if counts.ndim != 2 or not counts.size or counts.min() < 0 or counts.max() > EXPERT_COUNT:
        raise RecordingError(
            f"{where}: tpe has shape {counts.shape}; expected counts (microbatches, experts)."
        )
    return counts.astype(np.int64).sum(axis=0)


MEGATRON_COUNTS = Dialect(
    name="megatron_counts",
    versions="Megatron-LM d98e8a64dd (2026-08-22)",
    source="megatron/core/transformer/moe (tokens per expert); PR 3842",
    recognises=lambda path: shows(path, rb'"iter"\s{0,9}:', rb'"layer"\s{0,9}:', rb'"tpe"\s{0,9}:'),
    read=read_tokens_per_expert,
)


# ---------------------------------------------------------------------------------- llama-imatrix

_COUNTS_NAME = re.compile(r"blk\.(\d{1,4})\.ffn_(?:gate|up|down|gate_up)_exps\.weight\.counts")

#: From here on float32 holds even numbers only.
_EXACT = 2**24


def is_imatrix(path: Path) -> bool:
    """True for a GGUF file that calls itself an importance matrix."""
    if path.suffix != ".gguf" or not path.is_file():
        return False
    try:
        return _open(path).header.settings.get("general.type") == "imatrix"
    except CheckpointError:
        return False


def read_imatrix(path: Path) -> Trace:
    """One step of counts by layer and expert."""
    file = _open(path)
    by_layer: dict[int, np.ndarray] = {}
    for name in sorted(file.names()):
        match = _COUNTS_NAME.fullmatch(name)
        if match is None:
            continue
        layer, counts = int(match[1]), _counts(file, name, path.name)
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
    return Trace(
        path.name,
        "llama-imatrix",
        counts=np.stack(counts)[None],
        layers=layers,
        ids_are="logical",
        notes=counted_notes({"counts beyond 2^24, which are rounded": inexact}),
    )


def _counts(file: GgufFile, name: str, where: str) -> np.ndarray:
    info = file.info(name)
    if info.dtype != "F32" or len(info.shape) != 2 or info.shape[1] != 1:
        raise RecordingError(
            f"{where}: {name} is {info.dtype} of shape {info.shape}; expected F32 (experts, 1)."
        )
    if not 2 <= info.shape[0] <= TRACE_EXPERTS:
        raise RecordingError(f"{where}: {name} counts {info.shape[0]} experts.")
    with np.errstate(invalid="ignore"):  # a signalling nan is none of the counts either
        counts = file.read(name)[:, 0].astype(np.float64)
    if not np.isfinite(counts).all() or (counts < 0).any() or (counts != np.rint(counts)).any():
        raise RecordingError(
            f"{where}: {name} holds {counts.min():g} to {counts.max():g}, no counts."
        )
    if counts.max() >= 2**62:
        raise RecordingError(f"{where}: {name} counts up to {counts.max():g}.")
    return counts.astype(np.int64)


def _open(path: Path) -> GgufFile:
    return GgufFile(CountingFile(path, path.name, ReadLog()))


IMATRIX = Dialect(
    name="llama_imatrix",
    versions="GGUF since PR 9400 (2025)",
    source="llama.cpp tools/imatrix/imatrix.cpp, 006e7ef991",
    recognises=is_imatrix,
    read=read_imatrix,
)
