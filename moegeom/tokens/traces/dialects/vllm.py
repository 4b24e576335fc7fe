"""vLLM, ``enable_return_routed_experts``: replies of its servers, or arrays saved from Python.

Replies from 0.22 on hold base64 of an npy file in each choice, (tokens - 1, layers, k) in uint8 or
uint16; 0.21 split prompt and generation into nested lists. Layers without a router are zeros. In
Python ``CompletionOutput.routed_experts`` is such an array, one to a request, which users save.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.tokens.foreign.npy_arrays import iter_npz, npy_rows, npy_shape, npz_shapes
from moegeom.tokens.traces.dialect import Dialect
from moegeom.tokens.traces.dialects._encodings import Encodings, decoded, nested_ids, npy_ids
from moegeom.tokens.traces.dialects._json_records import shows
from moegeom.tokens.traces.dialects._responses import (
    choice_trace,
    count_or_none,
    object_list,
    replies_pieces,
)
from moegeom.tokens.traces.trace import (
    BEGINNING,
    PIECE_BYTES,
    Pieces,
    Place,
    RequestTrace,
    Trace,
    whole,
)

_ENCODINGS: Encodings = {"base64 of npy": npy_ids, "nested lists": nested_ids}

_NUMBERED = re.compile(r"arr_[0-9]+")

_FIELDS = (rb'"choices"', rb'routed_experts"\s{0,9}:\s{0,9}("k05VTVBZ|\[)')


def recognises(path: Path) -> bool:
    """True for replies with such a field, and for integers of three dimensions in npy or npz."""
    if path.suffix == ".npy" and path.is_file():
        return len(npy_shape(path) or ()) == 3
    if path.suffix == ".npz" and path.is_file():
        shapes = npz_shapes(path)
        return bool(shapes) and all(len(shape or ()) == 3 for shape in shapes.values())
    return shows(path, *_FIELDS)


def read(path: Path) -> Trace:
    """Every request of the file; those without routed experts are counted."""
    return whole(pieces(path, BEGINNING))


def pieces(path: Path, place: Place) -> Pieces:
    """Replies by pieces, members of an archive, or ranges of the rows of an array."""
    if path.suffix == ".npz":
        return _members(path, place)
    if path.suffix == ".npy":
        return _rows(path, place)
    return replies_pieces(path, place, "vLLM", _requests)


def _members(path: Path, place: Place) -> Pieces:
    requests: list[RequestTrace] = []
    size, number = 0, place[0]
    for number, (name, ids) in enumerate(iter_npz(path, place[0]), start=place[0]):
        if requests and size + ids.nbytes > PIECE_BYTES:
            yield Trace(path.name, "vLLM", tuple(requests)), (number, 0)
            requests, size = [], 0
        # names that NumPy gives are places
        requests.append(RequestTrace(name, ids, is_place=_NUMBERED.fullmatch(name) is not None))
        size += ids.nbytes
    yield Trace(path.name, "vLLM", tuple(requests)), None


def _rows(path: Path, place: Place) -> Pieces:
    """One request, whose rows are read range by range."""
    rows = npy_rows(path)
    step = max(1, PIECE_BYTES // max(1, rows.width * rows.dtype.itemsize))
    for start in range(place[0], max(rows.num_rows, 1), step):
        ids = np.empty((min(step, rows.num_rows - start), rows.width), rows.dtype)
        rows.read_into(start, ids)
        request = RequestTrace(
            path.stem, ids.reshape(len(ids), *rows.row_shape), is_place=True, first_row=start
        )
        stop = start + len(ids)
        yield Trace(path.name, "vLLM", (request,)), ((stop, 0) if stop < rows.num_rows else None)


def _requests(reply: Mapping[str, Any], where: str) -> Iterator[RequestTrace]:
    choices, usage = object_list(reply, "choices", where), reply.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    for number, choice in enumerate(choices):
        if choice.get("routed_experts") is None:
            continue
        at = f"{where}: choice {number}"
        ids = decoded(choice["routed_experts"], _ENCODINGS, at)
        if reply.get("prompt_routed_experts") is not None:
            ids = _after_prompt(decoded(reply["prompt_routed_experts"], _ENCODINGS, at), ids, at)
        cached = count_or_none(details, "cached_tokens", at)
        yield choice_trace(reply, choices, number, ids, where, num_omitted=cached)


def _after_prompt(prompt: np.ndarray, generated: np.ndarray, where: str) -> np.ndarray:
    if not generated.size:
        return prompt
    if prompt.shape[1:] != generated.shape[1:]:
        raise RecordingError(
            f"{where}: rows of the prompt have shape {prompt.shape[1:]}, those of the generation "
            f"{generated.shape[1:]}."
        )
    return np.concatenate([prompt, generated])


DIALECT = Dialect(
    name="vllm",
    versions="0.14 to 0.20 (saved arrays), 0.21 (nested lists), 0.22 to 0.33 (base64 npy)",
    source="vllm/entrypoints/openai protocol.py, RoutedExpertsManager; PRs 28284, 38939, 39568",
    recognises=recognises,
    read=read,
    pieces=pieces,
)
