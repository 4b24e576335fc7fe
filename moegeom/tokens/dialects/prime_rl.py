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
from moegeom.tokens.dialect import Dialect
from moegeom.tokens.dialects._encodings import Encodings, decoded, packed_ids
from moegeom.tokens.dialects._json_records import json_records, shows
from moegeom.tokens.dialects._responses import (
    count_or_none,
    joined,
    object_list,
    reply_name,
    token_ids_or_none,
    total,
)
from moegeom.tokens.trace import RequestTrace, Trace

_ENCODINGS: Encodings = {"an object with data, shape and dtype": packed_ids}

_FIELDS = (rb'"routed_experts"\s{0,9}:\s{0,9}\{', rb'"shape"\s{0,9}:')


def recognises(path: Path) -> bool:
    """True for records whose routed experts are an object with a shape."""
    return shows(path, *_FIELDS)


def read(path: Path) -> Trace:
    """Every response of the file; those without routed experts are counted."""
    requests, num_without = [], 0
    for where, reply in json_records(path):
        found = list(_requests(reply, where))
        requests += found
        num_without += not found
    notes = (f"replies without routed experts: {num_without:,}",) if num_without else ()
    return Trace(path.name, "prime-rl or SkyRL", tuple(requests), notes=notes)


def _requests(reply: Mapping[str, Any], where: str) -> Iterator[RequestTrace]:
    choices = object_list(reply, "choices", where) or [reply]
    name, usage = reply_name(reply, where), reply.get("usage")
    for number, choice in enumerate(choices):
        if choice.get("routed_experts") is None:
            continue
        at = f"{where}: choice {number}"
        ids = decoded(choice["routed_experts"], _ENCODINGS, at)
        if ids.ndim != 3:
            raise RecordingError(f"{at}: shape {ids.shape}; expected (tokens, layers, k).")
        prompt = token_ids_or_none(
            choice.get("prompt_token_ids", reply.get("prompt_token_ids")), at
        )
        generated = token_ids_or_none(choice.get("token_ids"), at)
        num_prompt = count_or_none(usage, "prompt_tokens", at)
        told = count_or_none(usage, "completion_tokens", at) if len(choices) == 1 else None
        yield RequestTrace(
            name if len(choices) == 1 else f"{name}/{number}",
            ids,
            token_ids=joined(prompt, generated),
            num_tokens=total(num_prompt, told),
            num_prompt=num_prompt if prompt is None else len(prompt),
            start=count_or_none(choice["routed_experts"], "start", at),
        )


DIALECT = Dialect(
    name="prime_rl",
    versions="prime-rl 559b44772e, SkyRL a9564572eb (both 2026-08-21)",
    source="prime_rl inference routes and transport types; skyrl generate_wire.py; PR 3051",
    recognises=recognises,
    read=read,
)
