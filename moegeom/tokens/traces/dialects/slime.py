"""slime and miles: the rollouts that ``--save-debug-rollout-data`` or ``--dump-details`` store.

``{"rollout_id", "samples": [...]}`` in a file of ``torch.save``; a sample holds its ``tokens``
(prompt and response) and ``rollout_routed_experts``, (tokens - 1, layers, k): a tensor in slime, a
NumPy array in miles. Layers without a router are zeros.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.tokens.traces.dialects._torch_file import TorchFile, has_keys, open_torch_file
from moegeom.tokens.traces.trace import (
    PIECE_BYTES,
    Dialect,
    Pieces,
    Place,
    RequestTrace,
    Trace,
    counted_notes,
)

_FIELD = "rollout_routed_experts"


def pieces(path: Path, place: Place) -> Pieces:
    """Samples by pieces."""
    file = open_torch_file(path)
    samples = file.root.get("samples") if isinstance(file.root, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise RecordingError(f"{path.name}: holds no list of samples.")
    requests: list[RequestTrace] = []
    num_missing = size = 0

    def piece() -> Trace:
        notes = counted_notes({"samples without routed experts": num_missing})
        return Trace(path.name, "slime or miles", tuple(requests), notes=notes)

    for number in range(place[0], len(samples)):
        if size >= PIECE_BYTES:
            yield piece(), (number, 0)
            requests, num_missing, size = [], 0, 0
        sample = samples[number]
        if sample.get(_FIELD) is None:
            num_missing += 1
            continue
        requests.append(_request(file, number, sample))
        size += requests[-1].ids.nbytes
    yield piece(), None


def _request(file: TorchFile, number: int, sample: dict[Any, Any]) -> RequestTrace:
    where = f"{file.label}: sample {number}"
    ids = file.array(sample[_FIELD], f"{where}: {_FIELD}")
    tokens = sample.get("tokens")
    token_ids = None if tokens is None else file.array(tokens, f"{where}: tokens")
    if ids.ndim != 3 or (token_ids is not None and token_ids.ndim != 1):
        raise RecordingError(
            f"{where}: {_FIELD} has shape {ids.shape}; expected (tokens - 1, layers, k)."
        )
    return RequestTrace(
        name=str(number),
        ids=ids,
        token_ids=token_ids,
        num_prompt=_num_prompt(token_ids, sample.get("response_length")),
        is_place=True,
    )


def _num_prompt(token_ids: np.ndarray | None, response: Any) -> int | None:
    """Tokens before the response, where the sample says how long that is."""
    if token_ids is None or type(response) is not int or not 0 <= response <= len(token_ids):
        return None
    return len(token_ids) - response


DIALECT = Dialect(
    name="slime",
    versions="slime 624b824a89 and miles 31f1ca961a (2026-08-21)",
    source="slime/utils/types.py (Sample), slime/ray/rollout.py; PRs slime 715, 810, 1045",
    recognises=lambda path: has_keys(path, "samples", _FIELD),
    pieces=pieces,
)
