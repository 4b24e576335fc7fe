"""How ids are written inside JSON: nested lists, base64 of an npy file, or bytes with a shape."""

from __future__ import annotations

import base64
import binascii
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Integer

from moegeom.core.errors import RecordingError
from moegeom.tokens.foreign.npy_arrays import parse_npy
from moegeom.tokens.stages import EXPERT_DTYPES

Ids = Integer[np.ndarray, "..."]

#: Lists in each other: sequences, tokens, layers and slots, and some to spare.
_MOST_DEPTH = 8

#: base64 of the first six bytes of every npy file.
NPY_START = "k05VTVBZ"


def nested_ids(value: Any, where: str) -> Ids:
    """Lists of lists of integers, of one length at each depth; nothing else is converted."""
    shape, flat = [], [value]
    while len(shape) < _MOST_DEPTH and set(map(type, flat)) == {list}:
        lengths = set(map(len, flat))
        if len(lengths) > 1:
            raise RecordingError(f"{where}: lists of unequal length ({_some(lengths)}).")
        shape.append(lengths.pop())
        flat = list(itertools.chain.from_iterable(flat))
    found = {kind.__name__ for kind in map(type, flat)} or {"nothing"}
    if found != {"int"} or not shape:
        raise RecordingError(f"{where}: holds {_some(found)}; expected nested lists of integers.")
    try:
        return np.array(flat, np.int64).reshape(shape)
    except OverflowError:
        raise RecordingError(f"{where}: holds an integer beyond 64 bits.") from None


def _some(found: set[Any]) -> str:
    return ", ".join(sorted(map(str, found))[:4])


def npy_ids(value: Any, where: str) -> Ids:
    """base64 of what ``numpy.save`` writes."""
    return parse_npy(from_base64(value, where), where)


def flat_int32(value: Any, where: str) -> Ids:
    """base64 of little-endian 32-bit integers, whose shape is not stored."""
    raw = from_base64(value, where)
    if len(raw) % 4:
        raise RecordingError(
            f"{where}: {len(raw)} bytes are no whole number of 32-bit integers.",
            "It is truncated, or written by another engine (--dialect).",
        )
    return np.frombuffer(raw, "<i4").astype(np.int32, copy=False)


def packed_ids(value: Any, where: str) -> Ids:
    """An object with base64 ``data``, ``shape`` and ``dtype`` (absent: uint8)."""
    if not isinstance(value, dict):
        raise RecordingError(f"{where}: holds {type(value).__name__}; expected an object.")
    shape, name = value.get("shape"), value.get("dtype", "uint8")
    if not isinstance(name, str) or name not in EXPERT_DTYPES:
        raise RecordingError(
            f"{where}: dtype {name!r:.40}; expected one of {', '.join(EXPERT_DTYPES)}."
        )
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise RecordingError(f"{where}: shape {shape!r:.60}; expected a list of sizes.")
    return shaped(from_base64(value.get("data"), where), EXPERT_DTYPES[name], shape, where)


def shaped(raw: bytes, dtype: np.dtype, shape: list[int], where: str) -> Ids:
    """Little-endian numbers in a shape that they must fill."""
    needed = math.prod(shape) * dtype.itemsize
    if needed != len(raw):
        raise RecordingError(
            f"{where}: {len(raw)} bytes; shape {shape} of {dtype} needs {needed}.",
            "It is truncated, or the dtype is not the one that was written.",
        )
    return np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(shape)


def from_base64(value: Any, where: str) -> bytes:
    """The bytes of a base64 text."""
    if not isinstance(value, str):
        raise RecordingError(f"{where}: holds {type(value).__name__}; expected a base64 text.")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise RecordingError(
            f"{where}: {len(value)} characters that are no base64.", "Is the text cut off?"
        ) from None


#: Readers by what a value looks like; a dialect takes the ones that its engine writes.
Encodings = Mapping[str, Callable[[Any, str], Ids]]


def decoded(value: Any, encodings: Encodings, where: str) -> Ids:
    """The ids, by the first encoding that this value looks like.

    Raises
    ------
    RecordingError
        When the dialect has no such encoding, or the value is damaged.
    """
    look = _look(value)
    if look not in encodings:
        raise RecordingError(
            f"{where}: ids are {look}; expected {' or '.join(encodings)}.",
            "Another engine wrote it (--dialect)?",
        )
    return encodings[look](value, where)


def _look(value: Any) -> str:
    if isinstance(value, str):
        return "base64 of npy" if value.startswith(NPY_START) else "base64 without shape"
    looks = {list: "nested lists", dict: "an object with data, shape and dtype"}
    return looks.get(type(value), type(value).__name__)
