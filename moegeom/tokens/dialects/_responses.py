"""What the replies of inference servers have in common: names, token ids and counts of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int64

from moegeom.core.errors import RecordingError

#: No sequence is longer.
_MOST_TOKENS = 2**31


def count_or_none(holder: Any, key: str, where: str) -> int | None:
    """A number of tokens, or None where the reply does not count them."""
    value = holder.get(key) if isinstance(holder, Mapping) else None
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < _MOST_TOKENS:
        raise RecordingError(f"{where}: '{key}' is {value!r:.40}; expected a number of tokens.")
    return value


def token_ids_or_none(value: Any, where: str) -> Int64[np.ndarray, "tokens"] | None:
    """A flat list of token ids, or None where there is none."""
    if not isinstance(value, list):
        return None
    if not all(type(token) is int and 0 <= token < _MOST_TOKENS for token in value):
        raise RecordingError(f"{where}: token ids are {value!r:.60}; expected numbers from 0 on.")
    return np.array(value, np.int64)


def joined(
    prompt: Int64[np.ndarray, "prompt"] | None, generated: Int64[np.ndarray, "generated"] | None
) -> Int64[np.ndarray, "tokens"] | None:
    """The whole sequence, where both of its parts are known."""
    return None if prompt is None or generated is None else np.concatenate([prompt, generated])


def total(prompt: int | None, generated: int | None) -> int | None:
    """Length of the whole sequence, where both counts are known."""
    return None if prompt is None or generated is None else prompt + generated


def reply_name(reply: Mapping[str, Any], where: str) -> str:
    """The id that the server gave, else the place in the file."""
    for key in ("id", "request_id", "rid"):
        if isinstance(reply.get(key), str | int) and not isinstance(reply.get(key), bool):
            return str(reply[key])[:80]
    return where.rpartition(": ")[2]


def object_list(holder: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    """A list of objects; empty where the key is absent."""
    found = holder.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise RecordingError(f"{where}: '{key}' is {found!r:.60}; expected a list of objects.")
    return found
