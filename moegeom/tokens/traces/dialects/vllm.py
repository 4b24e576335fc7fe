"""vLLM, ``enable_return_routed_experts``: replies of its servers, or arrays saved from Python.

Replies from 0.22 on hold base64 of an npy file in each choice, (tokens - 1, layers, k) in uint8 or
uint16; 0.21 split prompt and generation into nested lists. Layers without a router are zeros. In
Python ``CompletionOutput.routed_experts`` is such an array, one to a request, which users save.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np

from moegeom.tokens.foreign.npy import iter_npz, npy_rows, npy_shape, npz_shapes
from moegeom.tokens.traces.dialects._json import (
    ReplyFields,
    decoded,
    nested_ids,
    npy_ids,
    replies,
    shows,
)
from moegeom.tokens.traces.trace import PIECE_BYTES, Dialect, Pieces, Place, RequestTrace, Trace

_FIELDS = ReplyFields(
    items="choices[]",
    decode=partial(decoded, {"base64 of npy": npy_ids, "nested lists": nested_ids}),
    before=("/prompt_routed_experts",),
    num_omitted=("/usage.prompt_tokens_details.cached_tokens",),
)

_replies = replies("vLLM", [_FIELDS])

#: Names that NumPy gives to arrays without one.
_NUMBERED = re.compile(r"arr_[0-9]+")


def recognises(path: Path) -> bool:
    """True for replies with such a field, and for integers of three dimensions in npy or npz."""
    if path.suffix == ".npy" and path.is_file():
        return len(npy_shape(path) or ()) == 3
    if path.suffix == ".npz" and path.is_file():
        shapes = npz_shapes(path)
        return bool(shapes) and all(len(shape or ()) == 3 for shape in shapes.values())
    return shows(path, rb'"choices"', rb'routed_experts"\s{0,9}:\s{0,9}("k05VTVBZ|\[)')


def pieces(path: Path, place: Place) -> Pieces:
    """Replies by pieces, members of an archive, or ranges of the rows of an array."""
    readers = {".npz": _members, ".npy": _rows}
    return readers.get(path.suffix, _replies)(path, place)


def _members(path: Path, place: Place) -> Pieces:
    requests: list[RequestTrace] = []
    size, number = 0, place[0]
    for number, (name, ids) in enumerate(iter_npz(path, place[0]), start=place[0]):
        if requests and size + ids.nbytes > PIECE_BYTES:
            yield Trace(path.name, "vLLM", tuple(requests)), (number, 0)
            requests, size = [], 0
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


DIALECT = Dialect(
    name="vllm",
    versions="0.14 to 0.20 (saved arrays), 0.21 (nested lists), 0.22 to 0.33 (base64 npy)",
    source="vllm/entrypoints/openai protocol.py, RoutedExpertsManager; PRs 28284, 38939, 39568",
    recognises=recognises,
    pieces=pieces,
)
