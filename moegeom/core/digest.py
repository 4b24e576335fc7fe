"""SHA-256 of values and files: whatever is kept, and believed later, is known again by it.

Keys are forged where their hash can be: two checkpoints of one fingerprint would be one checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.files import open_regular

_BLOCK = 1 << 20


def digest_of(*values: Any) -> str:
    """SHA-256, in hex, of values of any kinds that JSON has, arrays, bytes, paths and records.

    Each value goes in with its kind and its length, so that no two lists of values are one text.
    The order of mappings and sets does not count. 64 characters; TypeError for other kinds.
    """
    return sha256_of(*values).hexdigest()


def sha256_of(*values: Any) -> hashlib._Hash:
    """The same as the object of hashlib, for its bytes."""
    state = hashlib.sha256()
    for value in values:
        _add(state, value)
    return state


def digest_of_file(path: Path) -> str:
    """SHA-256, in hex, of what a file holds; OSError where it cannot be read."""
    state = hashlib.sha256()
    with open_regular(path, follows=True) as file:
        while block := file.read(_BLOCK):
            state.update(block)
    return state.hexdigest()


def _add(state: hashlib._Hash, value: Any) -> None:
    if isinstance(value, np.ndarray):
        state.update(f"array {value.dtype.name} {value.dtype.str} {value.shape}\n".encode())
        state.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    elif isinstance(value, str | bytes | Path):
        raw = value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
        state.update(f"{'bytes' if isinstance(value, bytes) else 'text'} {len(raw)}\n".encode())
        state.update(raw)
    elif isinstance(value, np.generic):
        _add(state, value.item())
    elif isinstance(value, int | float | None):
        state.update(f"number {value!r}\n".encode())
    elif isinstance(value, Mapping):
        state.update(f"mapping {len(value)}\n".encode())
        for key in sorted(value, key=str):
            _add(state, key)
            _add(state, value[key])
    elif isinstance(value, Sequence | Set):
        state.update(f"list {len(value)}\n".encode())
        for one in sorted(value, key=str) if isinstance(value, Set) else value:
            _add(state, one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _add(state, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    else:
        raise TypeError(f"{type(value).__name__}: no value that has a digest")
