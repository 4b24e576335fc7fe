"""SGLang: replies with ``return_routed_experts``, and counts of its expert distribution recorders.

Replies hold base64 of raw 32-bit integers whose shape is not stored. ``/generate`` puts it into
``meta_info``, the OpenAI endpoints into ``sglext`` (also spelled ``sgl_ext``) of the reply or of
its first choice. The order of the k experts means nothing.

The recorder's mode ``stat`` dumps ``logical_count``, (steps, layers, experts), in a file of
``torch.save``; the buffer is dumped whole, so steps that were not used are zeros. Ranks of tensor
parallelism are added up: shares are right, totals may be multiples. Mode ``per_token`` holds
physical ids without requests.

The first recorder wrote ``expert_distribution_rank<n>_timestamp<t>.csv``, lines of
``layer_id,expert_id,count`` of what one rank saw; experts that were never chosen are not in it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.limits import COUNTS, EXPERT_COUNT, TRACE_EXPERTS, TRACE_LAYERS
from moegeom.tokens.traces.dialects._csv_numbers import csv_numbers, first_lines
from moegeom.tokens.traces.dialects._json import (
    ReplyFields,
    decoded,
    flat_int32,
    nested_ids,
    replies,
    shows,
)
from moegeom.tokens.traces.dialects._torch_file import has_keys, open_torch_file
from moegeom.tokens.traces.trace import Dialect, Trace, counted_notes

_OF_GENERATE = ReplyFields(
    items="meta_info",
    decode=partial(decoded, {"base64 without shape": flat_int32, "nested lists": nested_ids}),
    name=("id", "request_id", "rid"),
    prompt=("/input_ids",),
    generated=("/output_ids",),
    num_prompt=("prompt_tokens",),
    num_generated=("completion_tokens",),
    start=("routed_experts_start_len",),
    label="",
)
_OF_OPENAI = replace(
    _OF_GENERATE,
    name=("/id", "/request_id", "/rid"),
    num_prompt=("/usage.prompt_tokens",),
    num_generated=("/usage.completion_tokens",),
)
_EXTENSIONS = ("sglext", "sgl_ext", "choices[0].sglext", "choices[0].sgl_ext")

DIALECT = Dialect(
    name="sglang",
    versions="0.5.7 to 0.5.23",
    source="sglang/srt/state_capturer/routed_experts.py, detokenizer_manager.py; PR 12162",
    recognises=lambda path: shows(
        path, rb'"routed_experts"', rb'"(meta_info|sglext|sgl_ext)"\s{0,9}:'
    ),
    pieces=replies(
        "SGLang", [_OF_GENERATE, *(replace(_OF_OPENAI, items=items) for items in _EXTENSIONS)]
    ),
)

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

_NAMES = ("layer_id", "expert_id", "count")


def counts_of_a_rank(path: Path) -> Trace:
    """The counts as one step."""
    lines = csv_numbers(path, _NAMES, num_headers=1)
    if not len(lines):
        raise RecordingError(f"{path.name}: every count is 0: nothing was recorded.")
    most = (TRACE_LAYERS - 1, TRACE_EXPERTS - 1, EXPERT_COUNT)
    if (lines < 0).any() or (lines > most).any():
        raise RecordingError(
            f"{path.name}: values from {lines.min(axis=0).tolist()} to "
            f"{lines.max(axis=0).tolist()}; expected layers, experts and counts."
        )
    layers, layer = np.unique(lines[:, 0], return_inverse=True)
    num_experts = int(lines[:, 1].max()) + 1
    if len(layers) * num_experts > COUNTS:
        raise RecordingError(f"{path.name}: {len(layers)} x {num_experts:,} layers and experts.")
    key = layer * num_experts + lines[:, 1]
    if len(np.unique(key)) < len(key):
        raise RecordingError(
            f"{path.name}: an expert of a layer stands twice in it.",
            "Are these files of several ranks, one behind the other?",
        )
    counts = np.zeros((1, len(layers), num_experts), np.int64)
    counts[0, layer, lines[:, 1]] = lines[:, 2]
    return Trace(
        path.name,
        "SGLang's first recorder (one rank)",
        counts=counts,
        layers=tuple(layers.tolist()),
        counts_zeros=False,
        ids_are="logical",
    )


FIRST_RECORDER = Dialect(
    name="sglang_csv",
    versions="0.4.4 to 0.4.5",
    source="python/sglang/srt/managers/expert_distribution.py (dump_record); issue 5275",
    recognises=lambda path: first_lines(path, 1) == [",".join(_NAMES).encode()],
    read=counts_of_a_rank,
)
