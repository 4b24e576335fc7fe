"""Replies of engines that hold ids: vLLM, SGLang, prime-rl and SkyRL, NeMo RL and NeMo Gym.

A table says where a reply has its ids, how they are encoded, what names a request and what counts
its tokens. Layers without a router are zeros. The order of the k experts means nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.text import quoted
from moegeom.tokens.foreign.npy import iter_npz, npy_rows, npy_shape, npz_shapes
from moegeom.tokens.rows import read_rows
from moegeom.tokens.stages import EXPERT_DTYPES
from moegeom.tokens.traces.dialects._text import (
    Ids,
    ReplyFields,
    decoded,
    flat_int32,
    from_base64,
    nested_ids,
    npy_ids,
    replies,
    shaped,
    shows,
)
from moegeom.tokens.traces.trace import (
    WITHOUT_IDS,
    Dialect,
    Entry,
    Pieces,
    Place,
    RequestTrace,
    Trace,
    in_pieces,
    rows_of_piece,
)

# ------------------------------------------------------------------------------------------- vLLM
#
# With ``enable_return_routed_experts`` replies from 0.22 on hold base64 of an npy file in each
# choice, (tokens - 1, layers, k) in uint8 or uint16; 0.21 split prompt and generation into nested
# lists. In Python ``CompletionOutput.routed_experts`` is such an array, one to a request, which
# users save.

_VLLM_REPLIES = replies(
    "vLLM",
    [
        ReplyFields(
            items="choices[]",
            decode=partial(decoded, {"base64 of npy": npy_ids, "nested lists": nested_ids}),
            before=("/prompt_routed_experts",),
            num_omitted=("/usage.prompt_tokens_details.cached_tokens",),
        )
    ],
)

#: Names that NumPy gives to arrays without one.
_NUMBERED = re.compile(r"arr_[0-9]+")


def is_vllm(path: Path) -> bool:
    """True for replies with such a field, and for integers of three dimensions in npy or npz."""
    if path.suffix == ".npy" and path.is_file():
        return len(npy_shape(path) or ()) == 3
    if path.suffix == ".npz" and path.is_file():
        shapes = npz_shapes(path)
        return bool(shapes) and all(len(shape or ()) == 3 for shape in shapes.values())
    return shows(path, rb'"choices"', rb'routed_experts"\s{0,9}:\s{0,9}("k05VTVBZ|\[)')


def read_vllm(path: Path, place: Place) -> Pieces:
    """Replies by pieces, members of an archive, or ranges of the rows of an array."""
    if path.suffix == ".npz":
        return in_pieces(path.name, "vLLM", _members(path, place))
    return (_rows if path.suffix == ".npy" else _VLLM_REPLIES)(path, place)


def _members(path: Path, place: Place) -> Iterator[Entry]:
    for number, (name, ids) in enumerate(iter_npz(path, place[0]), start=place[0]):
        is_place = _NUMBERED.fullmatch(name) is not None
        yield (number, 0), [RequestTrace(name, ids, is_place=is_place)], {}


def _rows(path: Path, place: Place) -> Pieces:
    """One request, whose rows are read range by range."""
    rows = npy_rows(path)
    step = rows_of_piece(rows.width * rows.dtype.itemsize)
    for start in range(place[0], max(rows.num_rows, 1), step):
        stop = min(start + step, rows.num_rows)
        ids = read_rows(rows, start, stop)
        request = RequestTrace(path.stem, ids, is_place=True, first_row=start)
        yield Trace(path.name, "vLLM", (request,)), ((stop, 0) if stop < rows.num_rows else None)


VLLM = Dialect(
    name="vllm",
    versions="0.14 to 0.20 (saved arrays), 0.21 (nested lists), 0.22 to 0.33 (base64 npy)",
    source="vllm/entrypoints/openai protocol.py, RoutedExpertsManager; PRs 28284, 38939, 39568",
    recognises=is_vllm,
    pieces=read_vllm,
)


# ----------------------------------------------------------------------------------------- SGLang
#
# With ``return_routed_experts`` replies hold base64 of raw 32-bit integers whose shape is not
# stored. ``/generate`` puts it into ``meta_info``, the OpenAI endpoints into ``sglext`` (also
# spelled ``sgl_ext``) of the reply or of its first choice.

_OF_GENERATE = ReplyFields(
    items="meta_info",
    decode=partial(decoded, {"base64 without shape": flat_int32, "nested lists": nested_ids}),
    name=("id", "request_id", "rid"),
    prompt=("/input_ids",),
    generated=("/output_ids",),
    num_prompt=("prompt_tokens",),
    num_generated=("completion_tokens",),
    start=("routed_experts_start_len",),
    label="",
)
_OF_OPENAI = replace(
    _OF_GENERATE,
    name=("/id", "/request_id", "/rid"),
    num_prompt=("/usage.prompt_tokens",),
    num_generated=("/usage.completion_tokens",),
)
_EXTENSIONS = ("sglext", "sgl_ext", "choices[0].sglext", "choices[0].sgl_ext")

SGLANG = Dialect(
    name="sglang",
    versions="0.5.7 to 0.5.23",
    source="sglang/srt/state_capturer/routed_experts.py, detokenizer_manager.py; PR 12162",
    recognises=lambda path: shows(
        path, rb'"routed_experts"', rb'"(meta_info|sglext|sgl_ext)"\s{0,9}:'
    ),
    pieces=replies(
        "SGLang", [_OF_GENERATE, *(replace(_OF_OPENAI, items=items) for items in _EXTENSIONS)]
    ),
)


# ------------------------------------------------------------------------------ prime-rl and SkyRL
#
# An object with base64 ``data``, its ``shape`` and its ``dtype`` stands where vLLM puts its own
# form, in each choice of a reply, or on its own in a record. ``dtype`` is the narrowest that holds
# the largest id of this one response (absent in old files: uint8), ``start`` the position of the
# first row. Missing rows at the end are written as zeros.


def _packed_ids(value: Any, where: str) -> Ids:
    """An object with base64 ``data``, ``shape`` and ``dtype`` (absent: uint8)."""
    shape, name = value.get("shape"), value.get("dtype", "uint8")
    if not isinstance(name, str) or name not in EXPERT_DTYPES:
        raise RecordingError(
            f"{where}: dtype {name!r:.40}; expected one of {', '.join(EXPERT_DTYPES)}."
        )
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise RecordingError(f"{where}: shape {shape!r:.60}; expected a list of sizes.")
    ids = shaped(from_base64(value.get("data"), where), EXPERT_DTYPES[name], shape, where)
    return _of_three_axes(ids, where)


def _of_three_axes(ids: Ids, where: str) -> Ids:
    if ids.ndim != 3:
        raise RecordingError(f"{where}: shape {ids.shape}; expected (tokens, layers, k).")
    return ids


_OF_PRIME_RL = ReplyFields(
    items="choices[]",
    decode=partial(decoded, {"an object with data, shape and dtype": _packed_ids}),
    start=("routed_experts.start",),
)

PRIME_RL = Dialect(
    name="prime_rl",
    versions="prime-rl 559b44772e, SkyRL a9564572eb (both 2026-08-21)",
    source="prime_rl inference routes and transport types; skyrl generate_wire.py; PR 3051",
    recognises=lambda path: shows(path, rb'"routed_experts"\s{0,9}:\s{0,9}\{', rb'"shape"\s{0,9}:'),
    pieces=replies("prime-rl or SkyRL", [_OF_PRIME_RL, replace(_OF_PRIME_RL, items="")]),
)


# ------------------------------------------------------------------------------------- NeMo RL, Gym
#
# ``routed_experts`` is ``"nrlre1:<dtype>:<S>x<L>x<K>:<base64>"``. A line of a rollout file has
# ``response.output``, a reply of NeMo RL's server has ``choices``; in both an item that the model
# generated holds ``prompt_token_ids``, ``generation_token_ids`` and ``routed_experts``, a row for
# each token of both (nested lists in older files). The row of the last token is filled with
# 0, 1, .. k-1 in every layer, a row that the engine did not return with -1. The prompt of a later
# turn repeats the turns before it.

_ENVELOPE = re.compile(r"nrlre1:(int8|int16|int32):(\d{1,9})x(\d{1,9})x(\d{1,9}):")

#: Characters of an envelope in front of its base64, at most.
_HEAD = 60


def _unwrapped_ids(value: Any, where: str) -> Ids:
    if isinstance(value, list):
        return _of_three_axes(nested_ids(value, where), where)
    head = _ENVELOPE.match(value[:_HEAD]) if isinstance(value, str) else None
    if head is None:
        raise RecordingError(
            f"{where}: routed_experts is {quoted(value)}; expected "
            "nrlre1:<dtype>:<S>x<L>x<K>:<base64>.",
            "Another engine wrote it (--dialect)?",
        )
    shape = [int(head[n]) for n in (2, 3, 4)]
    return shaped(from_base64(value[head.end() :], where), EXPERT_DTYPES[head[1]], shape, where)


def _without_filler(turn: RequestTrace) -> RequestTrace:
    """The turn without the row of its last token, where it is the one that the writer fills in.

    It stands in layers without a router too, where everything else is zero.
    """
    ids, num_tokens = turn.ids, 0 if turn.token_ids is None else len(turn.token_ids)
    is_filler = len(ids) == num_tokens > 0 and (ids[-1] == np.arange(ids.shape[2])).all()
    return replace(turn, ids=ids[:-1]) if is_filler else turn


def _last_turns(turns: Sequence[RequestTrace]) -> list[RequestTrace]:
    """The turns whose tokens are not the beginning of the next one's prompt, without filler."""
    last = [turn for turn, after in itertools.pairwise(turns) if not _begins(turn, after)]
    return [_without_filler(turn) for turn in (*last, *turns[-1:])]


def _begins(turn: RequestTrace, after: RequestTrace) -> bool:
    assert turn.token_ids is not None
    assert after.token_ids is not None
    start = after.token_ids[: after.num_prompt][: len(turn.token_ids)]
    return np.array_equal(turn.token_ids, start)


_OF_NEMO_RL = ReplyFields(
    items="response.output[]",
    decode=_unwrapped_ids,
    numbers=("/_ng_task_index", "/_ng_rollout_index"),
    prompt=("prompt_token_ids",),
    generated=("generation_token_ids",),
    needs_tokens=True,
    num_prompt=(),
    num_generated=(),
    label="item",
)

NEMO_RL = Dialect(
    name="nemo_rl",
    versions="NeMo RL 7ea279abfb and NeMo Gym 07d6b0d070 (both 2026-08-22)",
    source="nemo_rl/utils/routed_experts_codec.py, nemo_rl/models/generation/vllm/utils.py; "
    "nemo_gym/openai_utils.py; PRs NeMo RL 2590, 3292",
    recognises=lambda path: shows(
        path,
        rb'"generation_token_ids"\s{0,9}:',
        rb'"routed_experts"\s{0,9}:\s{0,9}("nrlre1:|\[\s{0,9}\[\s{0,9}\[)',
    ),
    pieces=replies(
        "NeMo RL",
        [_OF_NEMO_RL, replace(_OF_NEMO_RL, items="choices[].message")],
        missing=f"records {WITHOUT_IDS}",
        select=_last_turns,
        left_out="turns that a later turn of the rollout repeats, left out",
    ),
)
