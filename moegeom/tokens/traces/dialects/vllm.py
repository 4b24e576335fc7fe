"""vLLM, ``enable_return_routed_experts``: replies of its servers, or arrays saved from Python.

Replies from 0.22 on hold base64 of an npy file in each choice, (tokens - 1, layers, k) in uint8 or
uint16; 0.21 split prompt and generation into nested lists. Layers without a router are zeros. In
Python ``CompletionOutput.routed_experts`` is such an array, one to a request, which users save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.files import read_regular, reading
from moegeom.tokens.foreign.npy_arrays import npy_shape, npz_shapes, parse_npy, read_npz
from moegeom.tokens.traces.dialect import Dialect
from moegeom.tokens.traces.dialects._encodings import Encodings, decoded, nested_ids, npy_ids
from moegeom.tokens.traces.dialects._json_records import shows
from moegeom.tokens.traces.dialects._responses import (
    choice_trace,
    count_or_none,
    object_list,
    replies_trace,
)
from moegeom.tokens.traces.trace import TRACE_BYTES, RequestTrace, Trace

_ENCODINGS: Encodings = {"base64 of npy": npy_ids, "nested lists": nested_ids}

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
    if path.suffix in (".npy", ".npz"):
        return Trace(path.name, "vLLM", _arrays(path))
    return replies_trace(path, "vLLM", _requests)


def _arrays(path: Path) -> tuple[RequestTrace, ...]:
    if path.suffix == ".npz":
        return tuple(RequestTrace(name, ids) for name, ids in read_npz(path).items())
    with reading(path, RecordingError, "Give large requests in several files."):
        raw = read_regular(path, TRACE_BYTES, follows=True)
    return (RequestTrace(path.stem, parse_npy(raw, path.name)),)


def _requests(reply: Mapping[str, Any], where: str) -> Iterator[RequestTrace]:
    choices, usage = object_list(reply, "choices", where), reply.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
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
)
