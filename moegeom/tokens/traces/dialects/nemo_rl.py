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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.text import quoted
from moegeom.tokens.stages import EXPERT_DTYPES
from moegeom.tokens.traces.dialect import Dialect
from moegeom.tokens.traces.dialects._encodings import Ids, from_base64, nested_ids, shaped
from moegeom.tokens.traces.dialects._json_records import json_records, shows
from moegeom.tokens.traces.dialects._responses import (
    is_place,
    object_list,
    reply_name,
    token_ids_or_none,
)
from moegeom.tokens.traces.trace import RequestTrace, Trace

_FIELD = "routed_experts"

_FIELDS = (
    rb'"generation_token_ids"\s{0,9}:',
    rb'"routed_experts"\s{0,9}:\s{0,9}("nrlre1:|\[\s{0,9}\[\s{0,9}\[)',
)

_ENVELOPE = re.compile(r"nrlre1:(int8|int16|int32):(\d{1,9})x(\d{1,9})x(\d{1,9}):")

#: Characters of an envelope in front of its base64, at most.
_HEAD = 60


def recognises(path: Path) -> bool:
    """True for records with generated token ids and an envelope, or triple lists, of experts."""
    return shows(path, *_FIELDS)


def read(path: Path) -> Trace:
    """Every turn that no later one repeats; records without routed experts are counted."""
    requests: list[RequestTrace] = []
    without = repeated = 0
    for record in json_records(path):
        turns = list(_turns(record.found, record.where))
        kept = _last_turns(turns)
        repeated += len(turns) - len(kept)
        requests += kept
        without += not turns
    said = (
        (without, "records without routed experts"),
        (repeated, "turns that a later turn of the rollout repeats, left out"),
    )
    notes = tuple(f"{text}: {count:,}" for count, text in said if count)
    return Trace(path.name, "NeMo RL", tuple(requests), notes=notes)


def _turns(record: Mapping[str, Any], where: str) -> Iterator[RequestTrace]:
    name, named_by_place = _name(record, where)
    for number, item in enumerate(_items(record, where)):
        if item.get(_FIELD) is None:
            continue
        at = f"{where}: item {number}"
        parts = [
            token_ids_or_none(item.get(key), at)
            for key in ("prompt_token_ids", "generation_token_ids")
        ]
        if parts[0] is None or parts[1] is None:
            raise RecordingError(
                f"{at}: {_FIELD} without prompt_token_ids and generation_token_ids.",
                "The writer puts all three into one item.",
            )
        tokens = np.concatenate([parts[0], parts[1]])
        ids = _without_filler(_ids(item[_FIELD], at), len(tokens))
        yield RequestTrace(
            f"{name}/{number}",
            ids,
            token_ids=tokens,
            num_prompt=len(parts[0]),
            is_place=named_by_place,
        )


def _items(record: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """What may hold routed experts: outputs of a rollout, or messages of a reply."""
    response = record.get("response")
    if isinstance(response, dict):
        return object_list(response, "output", where)
    choices = object_list(record, "choices", where)
    return [c["message"] for c in choices if isinstance(c.get("message"), dict)]


def _name(record: Mapping[str, Any], where: str) -> tuple[str, bool]:
    """What a record is called, and whether that is its place in the file."""
    numbers = [record.get(key) for key in ("_ng_task_index", "_ng_rollout_index")]
    if all(type(number) is int and 0 <= number < 2**31 for number in numbers):
        return "-".join(map(str, numbers)), False
    name = reply_name(record, where)
    return name, is_place(name, where)


def _ids(value: Any, where: str) -> Ids:
    if isinstance(value, list):
        ids = nested_ids(value, where)
        if ids.ndim != 3:
            raise RecordingError(f"{where}: shape {ids.shape}; expected (tokens, layers, k).")
        return ids
    head = _ENVELOPE.match(value[:_HEAD]) if isinstance(value, str) else None
    if head is None:
        raise RecordingError(
            f"{where}: {_FIELD} is {quoted(value)}; expected nrlre1:<dtype>:<S>x<L>x<K>:<base64>.",
            "Another engine wrote it (--dialect)?",
        )
    shape = [int(head[n]) for n in (2, 3, 4)]
    return shaped(from_base64(value[head.end() :], where), EXPERT_DTYPES[head[1]], shape, where)


def _without_filler(ids: Ids, num_tokens: int) -> Ids:
    """The rows without that of the last token, where it is the one that the writer fills in.

    It stands in layers without a router too, where everything else is zero.
    """
    if len(ids) != num_tokens or not len(ids):
        return ids
    return ids[:-1] if (ids[-1] == np.arange(ids.shape[2])).all() else ids


def _last_turns(turns: Sequence[RequestTrace]) -> list[RequestTrace]:
    """The turns whose tokens are not the beginning of the next one's prompt.

    What is left bears the name of its rollout where it is the only one.
    """
    afterwards = itertools.pairwise(turns)
    kept = [turn for turn, after in afterwards if not _begins(turn, after)] + [*turns[-1:]]
    if len(kept) == 1:
        return [replace(kept[0], name=kept[0].name.rpartition("/")[0])]
    return kept


def _begins(turn: RequestTrace, after: RequestTrace) -> bool:
    assert turn.token_ids is not None
    assert after.token_ids is not None
    start = after.token_ids[: after.num_prompt][: len(turn.token_ids)]
    return np.array_equal(turn.token_ids, start)


DIALECT = Dialect(
    name="nemo_rl",
    versions="NeMo RL 7ea279abfb and NeMo Gym 07d6b0d070 (both 2026-08-22)",
    source="nemo_rl/utils/routed_experts_codec.py, nemo_rl/models/generation/vllm/utils.py; "
    "nemo_gym/openai_utils.py; PRs NeMo RL 2590, 3292",
    recognises=recognises,
    read=read,
)
