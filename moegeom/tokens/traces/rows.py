"""Which rows of a request are tokens, and which position each has.

A row is a token of a sequence at every layer. Nothing is decided by looks alone: rows are cut where
they cannot be choices (one expert in all slots), or where the length of the sequence proves that
they are surplus. Where neither does, a request that looks padded is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32, Integer

from moegeom.core.errors import RecordingError
from moegeom.core.text import number_of
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.axes import unset_value
from moegeom.tokens.traces.trace import RequestTrace

#: Neighbouring rows that are equal in every layer; in text such runs do not come by chance.
_STALE_RUN = 10

#: What looks like padding is believed to be no accident below this probability.
_LOG10_ACCIDENT = -9.0


@dataclass(frozen=True, eq=False)
class PlacedRows:
    """The tokens of one request; ``position`` and ``token_id`` are -1 where not known.

    ``row`` is the place in the file, ``cut`` counts what was decided, by the kind of decision.
    """

    name: str
    ids: Integer[np.ndarray, "tokens layers slots"]
    row: Int32[np.ndarray, "tokens"]
    position: Int32[np.ndarray, "tokens"]
    token_id: Int32[np.ndarray, "tokens"]
    cut: Counter[str]


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows that are left, their places in the file, and the length of the sequence if known."""

    where: str
    ids: np.ndarray
    row: np.ndarray
    token_ids: np.ndarray | None
    num_tokens: int | None


def placed_rows(
    request: RequestTrace,
    ids: Integer[np.ndarray, "rows layers slots"],
    routers: Sequence[KnownRouter],
    last_is_routed: bool,
    where: str,
) -> PlacedRows:
    """The rows of ``request`` that are tokens; ``ids`` are its ids at the routers.

    Raises
    ------
    RecordingError
        When the number of rows contradicts the number of tokens, when a row names an expert twice
        or one that does not exist, or when rows look like padding and nothing proves it.
    """
    where = f"{where}: request {request.name}"
    cut: Counter[str] = Counter()
    rows = _unmasked(request, ids, where, cut)
    empty = _empty_rows(rows.ids)
    first, last = 0, len(rows.ids)
    offset: int | None = 0
    if rows.num_tokens is None:
        offset = request.start
    else:
        first, last, offset = _range(request, rows, empty, routers, last_is_routed, cut)
    kept = np.zeros(len(rows.ids), bool)
    kept[first:last] = True
    _count_empty(empty[first:last], cut)
    kept &= ~empty
    chosen = rows.ids[kept]
    _check_choices(chosen, rows.row[kept], routers, where)
    _refuse_padding(chosen, routers, where)
    _count_stale(chosen, routers, cut)
    at = np.flatnonzero(kept) - first
    position = np.full(len(at), -1, np.int32) if offset is None else (at + offset).astype(np.int32)
    if rows.token_ids is None or offset is None:
        token_id = np.full(len(at), -1)
    else:
        token_id = rows.token_ids[position]
    return PlacedRows(
        request.name,
        chosen,
        rows.row[kept].astype(np.int32),
        position,
        token_id.astype(np.int32),
        cut,
    )


def _unmasked(request: RequestTrace, ids: np.ndarray, where: str, cut: Counter[str]) -> _Rows:
    row, token_ids = np.arange(len(ids)), request.token_ids
    if request.mask is not None:
        if len(request.mask) != len(ids) or (token_ids is not None and len(token_ids) != len(ids)):
            raise RecordingError(
                f"{where} has {number_of(len(ids), 'row')} and a mask of {len(request.mask)}; "
                "expected as many."
            )
        cut["masked"] += int((~request.mask).sum())
        row, ids = row[request.mask], ids[request.mask]
        token_ids = None if token_ids is None else token_ids[request.mask]
        return _Rows(where, ids, row, token_ids, len(ids))
    num_tokens = request.num_tokens
    if token_ids is not None:
        if num_tokens not in (None, len(token_ids)):
            raise RecordingError(
                f"{where} lists {number_of(len(token_ids), 'token id')} and counts "
                f"{number_of(num_tokens, 'token')}.",
                "The ids are of another text, or of another request.",
            )
        num_tokens = len(token_ids)
    return _Rows(where, ids, row, token_ids, num_tokens)


def _range(
    request: RequestTrace,
    rows: _Rows,
    empty: np.ndarray,
    routers: Sequence[KnownRouter],
    last_is_routed: bool,
    cut: Counter[str],
) -> tuple[int, int, int]:
    """First row, last row and the position of the first, from the length of the sequence."""
    num_rows, num_tokens = len(rows.ids), rows.num_tokens
    assert num_tokens is not None
    start = request.start or 0
    expected = num_tokens - 1 - start
    if num_rows == expected:
        cut["last"] += 1
        cut["told start"] += start
        return 0, num_rows, start
    if num_rows > expected:
        return 0, _without_surplus(rows, empty, routers, last_is_routed, start, cut), start
    missing = expected - num_rows
    proofs = {
        "cached": request.num_omitted,
        "generation": request.num_prompt,
        "generation, and the last token of the prompt": (request.num_prompt or 0) - 1,
    }
    for what, length in proofs.items():
        if length == missing and not start:
            cut["last"] += 1
            cut[what] += missing
            return 0, num_rows, missing
    prompt = "" if request.num_prompt is None else f" ({request.num_prompt} of the prompt)"
    raise RecordingError(
        f"{rows.where} has {number_of(num_rows, 'row')} for "
        f"{number_of(num_tokens, 'token')}{prompt}; expected {expected}, "
        f"since an engine never routes the last token{f', from {start} on' if start else ''}.",
        f"{number_of(missing, 'row is', 'rows are')} missing and nothing in the file says which: "
        "have the engine tell how "
        "many it took from its cache, or switch omission of cached prefixes off.",
    )


def _without_surplus(
    rows: _Rows,
    empty: np.ndarray,
    routers: Sequence[KnownRouter],
    last_is_routed: bool,
    start: int,
    cut: Counter[str],
) -> int:
    """The end of the rows that are tokens, where there are more rows than routed tokens."""
    num_rows = len(rows.ids)
    assert rows.num_tokens is not None
    expected = rows.num_tokens - start
    surplus = slice(expected - 1, num_rows)
    padded = empty[surplus] | _is_pattern(rows.ids[surplus], routers)
    padded |= _repeats_neighbour(rows.ids)[surplus]
    if padded.all():
        cut["last"] += 1
        cut["surplus"] += num_rows - expected + 1
        return expected - 1
    if last_is_routed and (num_rows == expected or padded[1:].all()):
        cut["surplus"] += num_rows - expected
        return expected
    raise RecordingError(
        f"{rows.where} has {number_of(num_rows, 'row')} for {number_of(rows.num_tokens, 'token')}"
        f"{f' from {start} on' if start else ''}; expected {expected - 1}, and the "
        f"{num_rows - expected + 1} at the end look like choices.",
        "An engine never routes the last token that it sampled: the rows are of another request, "
        "or of a longer answer that was cut off.",
    )


def _empty_rows(ids: np.ndarray) -> Bool[np.ndarray, "rows"]:
    """Rows that say nothing in any layer: one number in all slots, which no choice can be."""
    return np.asarray(_empty_layers(ids).all(axis=1))


def _empty_layers(ids: np.ndarray) -> Bool[np.ndarray, "rows layers"]:
    if ids.shape[2] == 1:
        return ids[:, :, 0] == unset_value(ids.dtype)
    return np.asarray((ids == ids[:, :, :1]).all(axis=2))


def _count_empty(empty: np.ndarray, cut: Counter[str]) -> None:
    if empty.all():
        cut["unrecorded requests"] += 1
        cut["unrecorded"] += len(empty)
        return
    real = np.flatnonzero(~empty)
    cut["leading"] += int(real[0])
    cut["trailing"] += int(len(empty) - 1 - real[-1])
    cut["inside"] += int(empty[real[0] : real[-1] + 1].sum())


def _check_choices(
    ids: np.ndarray, row: np.ndarray, routers: Sequence[KnownRouter], where: str
) -> None:
    """Raises RecordingError for ids that are no experts, and for experts named twice."""
    if not len(ids):
        return
    num_experts = np.array([router.num_experts for router in routers])[:, None]
    above = ids >= num_experts
    if ids.dtype.kind == "i" and (ids < 0).any():
        at, layer, slot = np.argwhere(ids < 0)[0]
        raise RecordingError(
            f"{where}, row {row[at]}, layer {routers[layer].layer}: id {ids[at, layer, slot]} "
            f"beside others ({ids[at, layer].tolist()}); "
            f"{number_of(int((ids < 0).sum()), 'id is', 'ids are')} negative.",
            "A narrower integer has wrapped, or the row is damaged: -1 stands for a whole row.",
        )
    if above.any():
        at, layer, slot = np.argwhere(above)[0]
        raise RecordingError(
            f"{where}, row {row[at]}, layer {routers[layer].layer}: expert "
            f"{ids[at, layer, slot]}; the checkpoint has {routers[layer].num_experts}, and "
            f"{number_of(int(above.sum()), 'id names', 'ids name')} none of them.",
            "Physical ids of expert load balancing? Give its map (--expert-map), record with it "
            "off, or with an engine that captures logical ids: vLLM from 0.16, SGLang from 0.5.10.",
        )
    ordered = np.sort(ids, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
    if twice.any():
        at, layer = np.argwhere(twice)[0]
        raise RecordingError(
            f"{where}, row {row[at]}, layer {routers[layer].layer}: an expert stands twice in "
            f"{ids[at, layer].tolist()}; so it is in "
            f"{number_of(int(twice.any(axis=1).sum()), 'row')} of "
            f"{len(ids)}.",
            "Damaged or wrapped ids, or a wrong shape of the array.",
        )


def _is_pattern(ids: np.ndarray, routers: Sequence[KnownRouter]) -> Bool[np.ndarray, "rows"]:
    """Rows that count up by one in every layer, modulo the number of experts: written padding."""
    num_experts = np.array([router.num_experts for router in routers])[:, None]
    steps = (ids[:, :, 1:].astype(np.int64) - ids[:, :, :-1]) % num_experts
    return (steps == 1).all(axis=(1, 2)) & (ids.shape[2] > 1)


def _repeats_neighbour(ids: np.ndarray) -> Bool[np.ndarray, "rows"]:
    """Rows that equal the one before them in every layer."""
    same = (ids[1:] == ids[:-1]).all(axis=(1, 2))
    return np.concatenate([np.zeros(min(1, len(ids)), bool), same])


def _refuse_padding(ids: np.ndarray, routers: Sequence[KnownRouter], where: str) -> None:
    """Raises RecordingError where rows at either end count up in every layer, beyond accident."""
    pattern = _is_pattern(ids, routers)
    run = max(_leading(pattern), _leading(pattern[::-1]))
    top_k = ids.shape[2]
    one_row = sum(
        math.log10(r.num_experts) - math.log10(math.perm(r.num_experts, top_k)) for r in routers
    )
    if run and run * one_row < _LOG10_ACCIDENT:
        raise RecordingError(
            f"{where}: {number_of(run, 'row at an end holds', 'rows at an end hold')} experts that "
            f"count up by one in all {ids.shape[1]} layers, such as "
            f"{ids[0 if pattern[0] else -1, 0].tolist()}: padding written as experts.",
            "Store the token ids or a mask beside the ids; with them such rows are cut.",
        )


def _leading(flags: np.ndarray) -> int:
    return len(flags) if flags.all() else int(np.argmin(flags))


def _count_stale(ids: np.ndarray, routers: Sequence[KnownRouter], cut: Counter[str]) -> None:
    """Counts rows in long runs of equal rows, unless most rows are equal anyway."""
    same = _repeats_neighbour(ids)
    if len(routers) < 2 or 2 * same.sum() > len(same):
        return
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    lengths = edges[1::2] - edges[::2]
    cut["stale"] += int(lengths[lengths + 1 >= _STALE_RUN].sum())
