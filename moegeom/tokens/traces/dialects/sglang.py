"""SGLang, ``return_routed_experts``: base64 of raw 32-bit integers whose shape is not stored.

``/generate`` puts it into ``meta_info``, the OpenAI endpoints into ``sglext`` (also spelled
``sgl_ext``) of the reply or of its first choice. The order of the k experts means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moegeom.tokens.traces.dialect import Dialect
from moegeom.tokens.traces.dialects._encodings import Encodings, decoded, flat_int32, nested_ids
from moegeom.tokens.traces.dialects._json_records import shows
from moegeom.tokens.traces.dialects._responses import (
    count_or_none,
    is_place,
    joined,
    object_list,
    replies_pieces,
    reply_name,
    token_ids_or_none,
    total,
)
from moegeom.tokens.traces.trace import BEGINNING, Pieces, Place, RequestTrace, Trace, whole

_ENCODINGS: Encodings = {"base64 without shape": flat_int32, "nested lists": nested_ids}

_EXTENSIONS = ("sglext", "sgl_ext")

_FIELDS = (rb'"routed_experts"', rb'"(meta_info|sglext|sgl_ext)"\s{0,9}:')


def recognises(path: Path) -> bool:
    """True for replies with routed experts in one of SGLang's places."""
    return shows(path, *_FIELDS)


def read(path: Path) -> Trace:
    """Every request of the file; those without routed experts are counted."""
    return whole(pieces(path, BEGINNING))


def pieces(path: Path, place: Place) -> Pieces:
    """The requests by pieces."""
    return replies_pieces(path, place, "SGLang", _requests)


def _requests(reply: Mapping[str, Any], where: str) -> Iterator[RequestTrace]:
    meta = reply.get("meta_info")
    if isinstance(meta, Mapping):
        yield from _request(reply, meta, meta, reply_name(meta, where), where)
        return
    usage, name = reply.get("usage"), reply_name(reply, where)
    choices = object_list(reply, "choices", where)
    # only the first choice is captured where there are several, and usage adds them up
    counts = usage if isinstance(usage, Mapping) and len(choices) == 1 else {}
    for holder in (reply, *choices[:1]):
        for key in _EXTENSIONS:
            if isinstance(holder.get(key), Mapping):
                yield from _request(reply, holder[key], counts, name, where)
                return


def _request(
    reply: Mapping[str, Any],
    holder: Mapping[str, Any],
    counts: Mapping[str, Any],
    name: str,
    where: str,
) -> Iterator[RequestTrace]:
    if holder.get("routed_experts") is None:
        return
    prompt = token_ids_or_none(reply.get("input_ids"), where)
    num_prompt = count_or_none(counts, "prompt_tokens", where)
    generated = count_or_none(counts, "completion_tokens", where)
    yield RequestTrace(
        name,
        decoded(holder["routed_experts"], _ENCODINGS, where),
        token_ids=joined(prompt, token_ids_or_none(reply.get("output_ids"), where)),
        num_tokens=total(num_prompt, generated),
        num_prompt=num_prompt,
        start=count_or_none(holder, "routed_experts_start_len", where),
        is_place=is_place(name, where),
    )


DIALECT = Dialect(
    name="sglang",
    versions="0.5.7 to 0.5.23",
    source="sglang/srt/state_capturer/routed_experts.py, detokenizer_manager.py; PR 12162",
    recognises=recognises,
    read=read,
    pieces=pieces,
)
