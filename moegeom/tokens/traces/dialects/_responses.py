"""What the replies of inference servers have in common: names, token ids and counts of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from moegeom.core.errors import RecordingError
from moegeom.tokens.traces.dialects._json_records import json_records
from moegeom.tokens.traces.trace import (
    BEGINNING,
    PIECE_BYTES,
    Pieces,
    Place,
    RequestTrace,
    Trace,
)

#: What a request takes beside its ids.
_REQUEST_BYTES = 1000

#: No sequence is longer.
_MOST_TOKENS = 2**31


def replies_pieces(
    path: Path,
    place: Place,
    engine: str,
    requests_of: Callable[[Mapping[str, Any], str], Iterable[RequestTrace]],
) -> Pieces:
    """The requests of a file of replies by pieces; those without routed experts are counted.

    ``requests_of`` takes a reply and its place in the file.
    """
    requests: list[RequestTrace] = []
    num_without = size = 0
    begun = None
    for record in json_records(path, place):
        # entries of one document have no place of their own
        if begun is not None and size >= PIECE_BYTES and begun != BEGINNING:
            yield _piece(path, engine, requests, num_without), begun
            requests, num_without, size = [], 0, 0
        found = list(requests_of(record.found, record.where))
        requests += found
        num_without += not found
        size += sum(request.ids.nbytes + _REQUEST_BYTES for request in found)
        begun = record.following
    yield _piece(path, engine, requests, num_without), None


def _piece(path: Path, engine: str, requests: list[RequestTrace], num_without: int) -> Trace:
    notes = (f"replies without routed experts: {num_without:,}",) if num_without else ()
    return Trace(path.name, engine, tuple(requests), notes=notes)


def choice_trace(
    reply: Mapping[str, Any],
    choices: list[Mapping[str, Any]],
    number: int,
    ids: np.ndarray,
    where: str,
    *,
    num_omitted: int | None = None,
    start: int | None = None,
) -> RequestTrace:
    """The request of one of a reply's choices: its name and what the reply says of its tokens."""
    choice, usage, name = choices[number], reply.get("usage"), reply_name(reply, where)
    named_by_place = is_place(name, where)
    where = f"{where}: choice {number}"
    prompt = token_ids_or_none(choice.get("prompt_token_ids", reply.get("prompt_token_ids")), where)
    generated = token_ids_or_none(choice.get("token_ids"), where)
    num_prompt = count_or_none(usage, "prompt_tokens", where)
    # usage adds up the choices
    told = count_or_none(usage, "completion_tokens", where) if len(choices) == 1 else None
    return RequestTrace(
        name if len(choices) == 1 else f"{name}/{number}",
        ids,
        token_ids=joined(prompt, generated),
        num_tokens=total(num_prompt, told),
        num_prompt=num_prompt if prompt is None else len(prompt),
        num_omitted=num_omitted,
        start=start,
        is_place=named_by_place,
    )


def count_or_none(holder: Any, key: str, where: str) -> int | None:
    """A number of tokens, or None where the reply does not count them."""
    value = holder.get(key) if isinstance(holder, dict) else None
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < _MOST_TOKENS:
        raise RecordingError(f"{where}: '{key}' is {value!r:.40}; expected a number of tokens.")
    return value


def token_ids_or_none(value: Any, where: str) -> Int64[np.ndarray, "tokens"] | None:
    """A flat list of token ids, or None where there is none."""
    if not isinstance(value, list):
        return None
    if set(map(type, value)) <= {int} and (
        not value or (min(value) >= 0 and max(value) < _MOST_TOKENS)
    ):
        return np.array(value, np.int64)
    raise RecordingError(f"{where}: token ids are {value!r:.60}; expected numbers from 0 on.")


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


def is_place(name: str, where: str) -> bool:
    """Whether the name of a reply is its place in the file."""
    return name == where.rpartition(": ")[2]


def object_list(holder: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    """A list of objects; empty where the key is absent."""
    found = holder.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise RecordingError(f"{where}: '{key}' is {found!r:.60}; expected a list of objects.")
    return found
