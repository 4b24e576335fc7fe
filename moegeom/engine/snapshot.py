"""A scan's progress as a file, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from moegeom.core.documents import DocumentError, parse_json
from moegeom.core.errors import RecordingError
from moegeom.core.files import write_whole
from moegeom.engine.loop import Progress
from moegeom.tokens.foreign.npy_arrays import read_numbers

#: The array with the text that says how far the scan was, and what the other arrays hash to.
_HEADER = "header"

#: What else it says.
_FACTS = ("next_tile", "num_tokens", "non_finite", "num_non_finite")

#: Bytes of the states of one router; those of 1024 experts have some hundred million.
_MOST_BYTES = 1 << 33


def write_snapshot(path: Path, progress: Progress) -> None:
    """Writes ``path`` whole or not at all."""
    arrays = {
        f"{reduction}/{name}": array
        for reduction, state in progress.states.items()
        for name, array in state.items()
    }
    facts = {name: getattr(progress, name) for name in _FACTS}
    text = json.dumps(facts | {"digest": _digest(facts, arrays)})
    arrays[_HEADER] = np.frombuffer(text.encode(), np.uint8)
    write_whole(path, lambda file: np.savez(file, allow_pickle=False, **arrays))


def read_snapshot(path: Path) -> Progress | None:
    """The progress in ``path``; None when there is none, or when it is not as it was written.

    The scan of the router then begins anew: nothing is believed of a file that was cut off or
    changed.
    """
    if not path.exists():
        return None
    try:
        arrays = read_numbers(path, _MOST_BYTES)
        facts = parse_json(arrays.pop(_HEADER, np.zeros(0, np.uint8)).tobytes())
    except (RecordingError, DocumentError):
        return None
    if not isinstance(facts, dict) or {*facts} != {*_FACTS, "digest"}:
        return None
    if facts.pop("digest") != _digest(facts, arrays):
        return None
    states: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        reduction, _, name = key.partition("/")
        states.setdefault(reduction, {})[name] = array
    facts["non_finite"] = tuple(facts["non_finite"])
    return Progress(**facts, states=states)


def _digest(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """A hash of everything that a snapshot says."""
    found = xxhash.xxh3_128(json.dumps(facts, sort_keys=True).encode())
    for key in sorted(arrays):
        array = np.ascontiguousarray(arrays[key])
        found.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()
