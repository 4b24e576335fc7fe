"""Arrays and facts kept between runs in one file, with a hash that exposes any change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.digest import digest_of
from moegeom.core.documents import DocumentError, parse_json
from moegeom.core.errors import RecordingError
from moegeom.core.files import write_whole
from moegeom.tokens.foreign.npy_arrays import read_numbers

#: The array with the text that says the facts, and what all of it hashes to.
_HEADER = "header"


def write_sealed(path: Path, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes ``path`` whole or not at all; ``facts`` are what JSON has."""
    text = json.dumps({**facts, "digest": _digest(facts, arrays)})
    members = {**arrays, _HEADER: np.frombuffer(text.encode(), np.uint8)}
    write_whole(path, lambda file: np.savez(file, allow_pickle=False, **members))


def read_sealed(path: Path, most: int) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """Facts and arrays; None when there are none, or they are not as they were written.

    No more than ``most`` bytes of arrays are read.
    """
    if not path.exists():
        return None
    try:
        arrays = read_numbers(path, most)
        facts = parse_json(arrays.pop(_HEADER, np.zeros(0, np.uint8)).tobytes())
    except (RecordingError, DocumentError):
        return None
    if not isinstance(facts, dict) or facts.pop("digest", None) != _digest(facts, arrays):
        return None
    return facts, arrays


def _digest(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """A hash of everything that the file says."""
    return digest_of(json.dumps(facts, sort_keys=True), arrays)
