"""prime-rl and SkyRL: an object with base64 ``data``, its ``shape`` and its ``dtype``.

It stands where vLLM puts its own form, in each choice of a reply, or on its own in a record.
``dtype`` is the narrowest that holds the largest id of this one response (absent in old files:
uint8), ``start`` the position of the first row. Missing rows at the end are written as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moegeom.core.errors import RecordingError
from moegeom.tokens.traces.dialect import Dialect
from moegeom.tokens.traces.dialects._encodings import Encodings, decoded, packed_ids
from moegeom.tokens.traces.dialects._json_records import shows
from moegeom.tokens.traces.dialects._responses import (
    choice_trace,
    count_or_none,
    object_list,
    replies_pieces,
)
from moegeom.tokens.traces.trace import BEGINNING, Pieces, Place, RequestTrace, Trace, whole

_ENCODINGS: Encodings = {"an object with data, shape and dtype": packed_ids}

_FIELDS = (rb'"routed_experts"\s{0,9}:\s{0,9}\{', rb'"shape"\s{0,9}:')


def recognises(path: Path) -> bool:
    """True for records whose routed experts are an object with a shape."""
    return shows(path, *_FIELDS)


def read(path: Path) -> Trace:
    """Every response of the file; those without routed experts are counted."""
    return whole(pieces(path, BEGINNING))


def pieces(path: Path, place: Place) -> Pieces:
    """The responses by pieces."""
    return replies_pieces(path, place, "prime-rl or SkyRL", _requests)


def _requests(reply: Mapping[str, Any], where: str) -> Iterator[RequestTrace]:
    choices = object_list(reply, "choices", where) or [reply]
    for number, choice in enumerate(choices):
        if choice.get("routed_experts") is None:
            continue
        at = f"{where}: choice {number}"
        ids = decoded(choice["routed_experts"], _ENCODINGS, at)
        if ids.ndim != 3:
            raise RecordingError(f"{at}: shape {ids.shape}; expected (tokens, layers, k).")
        start = count_or_none(choice["routed_experts"], "start", at)
        yield choice_trace(reply, choices, number, ids, where, start=start)


DIALECT = Dialect(
    name="prime_rl",
    versions="prime-rl 559b44772e, SkyRL a9564572eb (both 2026-08-21)",
    source="prime_rl inference routes and transport types; skyrl generate_wire.py; PR 3051",
    recognises=recognises,
    read=read,
    pieces=pieces,
)
