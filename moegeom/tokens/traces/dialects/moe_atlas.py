"""moe-atlas: a line of JSON for each choice, ``{layer, token_idx, expert_idx, gate_weight}``.

Known are these four fields and not their writer, so that nothing else is read: no requests, no
token ids. The slots of a token are ordered by ``gate_weight``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.limits import TRACE_BYTES
from moegeom.core.shapes import Int32
from moegeom.core.text import number_of
from moegeom.tokens.traces.dialects._json import json_records, shows, whole_number
from moegeom.tokens.traces.trace import Dialect, RequestTrace, Trace

_LAYER, _TOKEN, _EXPERT, _WEIGHT = "layer", "token_idx", "expert_idx", "gate_weight"


def read(path: Path) -> Trace:
    """All tokens by number, as one batch; a token between others that has no line is empty."""
    choices: list[tuple[int, int, int]] = []
    weights: list[float] = []
    for record in json_records(path):
        where, line = record.where, record.value
        expert, weight = line.get(_EXPERT), line.get(_WEIGHT)
        if type(expert) is not int or not abs(expert) < 2**31:
            raise RecordingError(f"{where}: '{_EXPERT}' is {expert!r:.40}; expected an expert.")
        choices.append(
            (whole_number(line, _TOKEN, where), whole_number(line, _LAYER, where), expert)
        )
        if isinstance(weight, bool) or not isinstance(weight, int | float) or abs(weight) > 2**127:
            raise RecordingError(f"{where}: '{_WEIGHT}' is {weight!r:.40}; expected a number.")
        weights.append(float(weight))
    if not choices:
        raise RecordingError(f"{path.name}: no choices.")
    layers, ids = _arranged(path.name, np.array(choices, np.int64), np.array(weights))
    return Trace(
        path.name,
        "moe-atlas",
        (RequestTrace(path.stem, ids, is_place=True),),
        layers=layers,
        has_documents=False,
    )


def _arranged(
    name: str, choices: np.ndarray, weights: np.ndarray
) -> tuple[tuple[int, ...], Int32[np.ndarray, "tokens layers slots"]]:
    """Layers, and ids by token; -1 for a token that has no line at a layer."""
    order = np.lexsort((-weights, choices[:, 1], choices[:, 0]))
    token, layer, expert = choices[order].T
    first = np.concatenate([[True], (np.diff(token) != 0) | (np.diff(layer) != 0)])
    starts = np.flatnonzero(first)
    slots = np.diff(starts, append=len(token))
    layers, column = np.unique(layer, return_inverse=True)
    top_k, num_rows = int(slots.max()), int(token[-1] - token[0]) + 1
    if slots.min() < top_k:
        at = starts[np.argmin(slots)]
        raise RecordingError(
            f"{name}: token {token[at]}, layer {layer[at]}: "
            f"{number_of(slots.min(), 'choice')}; another has {top_k}.",
            "Several prompts in one file number their tokens from 0 each: give each a file of its "
            "own. Or the file was cut off.",
        )
    if 4 * num_rows * len(layers) * top_k > TRACE_BYTES:
        raise RecordingError(
            f"{name}: tokens from {token[0]} to {token[-1]} in {number_of(len(layers), 'layer')}: "
            f"more than {TRACE_BYTES:,} bytes of ids."
        )
    ids = np.full((num_rows, len(layers), top_k), -1, np.int32)
    slot = np.arange(len(token)) - np.repeat(starts, slots)
    ids[token - token[0], column, slot] = expert
    return tuple(layers.tolist()), ids


DIALECT = Dialect(
    name="moe_atlas",
    versions="the fields as users describe them",
    source="no writer is public; layer, token_idx, expert_idx, gate_weight, one choice to a line",
    recognises=lambda path: shows(
        path,
        *(rb'"%b"\s{0,9}:' % name.encode() for name in (_LAYER, _TOKEN, _EXPERT, _WEIGHT)),
    ),
    read=read,
)
