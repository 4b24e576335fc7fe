"""NeMo RL and NeMo Gym: rollouts whose items hold ``"nrlre1:<dtype>:<S>x<L>x<K>:<base64>"``.

A line of a rollout file has ``response.output``, a reply of NeMo RL's server has ``choices``; in
both an item that the model generated holds ``prompt_token_ids``, ``generation_token_ids`` and
``routed_experts``, a row for each token of both (nested lists in older files). The row of the last
token is filled with 0, 1, .. k-1 in every layer, a row that the engine did not return with -1. The
prompt of a later turn repeats the turns before it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.text import quoted
from moegeom.tokens.stages import EXPERT_DTYPES
from moegeom.tokens.traces.dialects._json import (
    Ids,
    ReplyFields,
    from_base64,
    nested_ids,
    replies,
    shaped,
    shows,
)
from moegeom.tokens.traces.trace import Dialect, RequestTrace

_ENVELOPE = re.compile(r"nrlre1:(int8|int16|int32):(\d{1,9})x(\d{1,9})x(\d{1,9}):")

#: Characters of an envelope in front of its base64, at most.
_HEAD = 60


def _decoded(value: Any, where: str) -> Ids:
    if isinstance(value, list):
        ids = nested_ids(value, where)
        if ids.ndim != 3:
            raise RecordingError(f"{where}: shape {ids.shape}; expected (tokens, layers, k).")
        return ids
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


_FIELDS = ReplyFields(
    items="response.output[]",
    decode=_decoded,
    numbers=("/_ng_task_index", "/_ng_rollout_index"),
    prompt=("prompt_token_ids",),
    generated=("generation_token_ids",),
    needs_tokens=True,
    num_prompt=(),
    num_generated=(),
    label="item",
)

DIALECT = Dialect(
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
        [_FIELDS, replace(_FIELDS, items="choices[].message")],
        missing="records without routed experts",
        select=_last_turns,
        left_out="turns that a later turn of the rollout repeats, left out",
    ),
)
