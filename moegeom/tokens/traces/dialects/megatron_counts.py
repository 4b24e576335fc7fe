"""Megatron-LM, ``--save-tokens-per-expert-interval``: counts by iteration, layer and microbatch.

``tokens_per_expert/rank0.jsonl`` counts the experts of its own rank, behind the dispatch. Which
experts those are is not written: with expert parallelism the ranks cannot be put together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from moegeom.core.errors import RecordingError
from moegeom.core.limits import TRACE_BYTES
from moegeom.tokens.traces.dialects._json import json_records, nested_ids, shows, whole_number
from moegeom.tokens.traces.trace import Dialect, Trace

_FIELDS = (rb'"iter"\s{0,9}:', rb'"layer"\s{0,9}:', rb'"tpe"\s{0,9}:')

#: More slots than a microbatch has; sums of many stay exact.
_MOST = 2**40


def recognises(path: Path) -> bool:
    """True for lines with counts of an iteration and layer."""
    return shows(path, *_FIELDS)


def read(path: Path) -> Trace:
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
    note = f"lines of prediction heads (mtp), left out: {others:,}"
    return Trace(
        path.name,
        "Megatron-LM (one rank, behind the dispatch)",
        counts=counts,
        layers=layers,
        ids_are="logical",
        notes=(note,) if others else (),
    )


def _counts(line: Mapping[str, Any], where: str) -> Int64[np.ndarray, "experts"]:
    found = nested_ids(line.get("tpe"), f"{where}: tpe")
    if found.ndim != 2 or not found.size or found.min() < 0 or found.max() > _MOST:
        raise RecordingError(
            f"{where}: tpe has shape {found.shape}; expected counts (microbatches, experts)."
        )
    return found.astype(np.int64).sum(axis=0)


DIALECT = Dialect(
    name="megatron_counts",
    versions="Megatron-LM d98e8a64dd (2026-08-22)",
    source="megatron/core/transformer/moe (tokens per expert); PR 3842",
    recognises=recognises,
    read=read,
)
