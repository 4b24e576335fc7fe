"""Which rows of a request are tokens, and which position each has.

A row is a token of a sequence at every layer. Nothing is decided by looks alone: rows are cut where
they cannot be choices (one expert in all slots), or where the length of the sequence proves that
they are surplus. Where neither does, a request that looks padded is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.shapes import Bool, Int32, Integer
from moegeom.core.text import all_of, number_of
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.axes import unset_value
from moegeom.tokens.traces.ids import check_choices
from moegeom.tokens.traces.oddities import ABSENT, SEVERAL, Gap, gap_of
from moegeom.tokens.traces.trace import RequestTrace

#: Neighbouring rows that are equal in every layer; in text such runs do not come by chance.
_STALE_RUN = 10

#: What looks like padding is believed to be no accident below this probability.
_LOG10_ACCIDENT = -9.0


class RowSpan(NamedTuple):
    """First row of a request that is a token, and its position; -1 where not known."""

    first: int
    position: int


@dataclass(frozen=True, eq=False)
class TokenRows:
    """The tokens of one request, or of a part of one: ids as they are stored.

    ``row`` is the place in the request; ``position`` and ``token_id`` are -1 where not known.
    """

    ids: Integer[np.ndarray, "tokens routers slots"]
    row: Int32[np.ndarray, "tokens"]
    position: Int32[np.ndarray, "tokens"]
    token_id: Int32[np.ndarray, "tokens"]

    @classmethod
    def of(
        cls, request: RequestTrace, ids: np.ndarray, row: np.ndarray, position: np.ndarray
    ) -> TokenRows:
        """The given rows of a request, with its token ids."""
        token_ids = request.token_ids
        if token_ids is None or (len(position) and position[0] < 0):
            token_id = np.full(len(position), -1, np.int32)
        else:
            token_ids = token_ids if request.mask is None else token_ids[request.mask]
            token_id = token_ids[position].astype(np.int32)
        return cls(ids, row.astype(np.int32), position.astype(np.int32), token_id)

    @classmethod
    def of_span(cls, request: RequestTrace, ids: np.ndarray, span: RowSpan) -> TokenRows:
        """Rows that follow one another; ``ids`` are theirs."""
        step = np.arange(len(ids), dtype=np.int32)
        position = np.full_like(step, -1) if span.position < 0 else step + np.int32(span.position)
        return cls.of(request, ids, step + np.int32(span.first), position)

    @property
    def span(self) -> RowSpan | None:
        """Where the tokens are, if they follow one another; None where rows between are none."""
        if not len(self.row):
            return RowSpan(0, -1)
        if self.row[-1] - self.row[0] + 1 != len(self.row):
            return None
        return RowSpan(int(self.row[0]), int(self.position[0]))


class RequestCleaning:
    """Finds the rows of one request that are tokens; its rows may come in several parts.

    ``cut`` counts what was decided once the request has ended, by the kind of decision, and ``gap``
    is what it lacks then.
    """

    def __init__(
        self, request: RequestTrace, routers: Sequence[KnownRouter], where: str, may_be_empty: bool
    ) -> None:
        self._where = f"{where}: request {request.name}"
        self._may_be_empty = may_be_empty
        self._routers = routers
        self._empty, self._pattern, self._same = _Flags(), _Flags(), _Flags()
        self._missing: list[np.ndarray] = []
        self._prompt: int | None = None
        self._num_repeats, self._filling, self._is_counted = 0, ABSENT, False
        self._before: np.ndarray | None = None
        self._num_stale = 0
        self._first_slots = self._last_slots = np.zeros(0, np.int64)
        self.cut: Counter[str] = Counter()
        self.gap = Gap()

    def tokens_of(
        self, request: RequestTrace, ids: Integer[np.ndarray, "rows routers slots"]
    ) -> TokenRows:
        """The rows of the request that are tokens; ``ids`` are its ids at the routers.

        Raises
        ------
        RecordingError
            When the number of rows contradicts the number of tokens, or when a row names an expert
            twice or one that does not exist.
        """
        row = np.arange(len(ids)) + request.first_row
        num_tokens = self._num_tokens(request, len(ids))
        if request.mask is not None:
            self.cut["masked"] += int((~request.mask).sum())
            row, ids = row[request.mask], ids[request.mask]
        empty = _empty_rows(ids)
        first, last = 0, len(ids)
        offset: int | None = 0
        if num_tokens is None:
            offset = None if request.start is None else request.start + request.first_row
        else:
            first, last, offset = self._range(request, ids, empty, num_tokens)
        self._is_counted = num_tokens is not None
        if request.num_prompt is not None and offset is not None:
            num_absent = sum(map(len, self._missing))
            self._prompt = request.num_prompt - offset + num_absent
        self._add_missing(ids, empty, slice(first, last))
        is_token = np.zeros(len(ids), bool)
        is_token[first:last] = ~empty[first:last]
        chosen = ids[is_token]
        check_choices(chosen, row[is_token], self._routers, self._where, self._may_be_empty)
        self._count_looks(chosen)
        at = np.flatnonzero(is_token) - first
        position = np.full(len(at), -1) if offset is None else at + offset
        return TokenRows.of(request, chosen, row[is_token], position)

    def _num_tokens(self, request: RequestTrace, num_rows: int) -> int | None:
        """Tokens of the sequence, or of the mask; None where nothing counts them."""
        token_ids, num_tokens = request.token_ids, request.num_tokens
        if request.mask is not None:
            lengths = {len(request.mask), num_rows if token_ids is None else len(token_ids)}
            if lengths != {num_rows}:
                raise RecordingError(
                    f"{self._where} has {number_of(num_rows, 'row')} and a mask of "
                    f"{len(request.mask)}; expected as many."
                )
            return int(request.mask.sum())
        if token_ids is None:
            return num_tokens
        if num_tokens not in (None, len(token_ids)):
            raise RecordingError(
                f"{self._where} lists {number_of(len(token_ids), 'token id')} and counts "
                f"{number_of(num_tokens, 'token')}.",
                "The ids are of another text, or of another request.",
            )
        return len(token_ids)

    def _range(
        self, request: RequestTrace, ids: np.ndarray, empty: np.ndarray, num_tokens: int
    ) -> tuple[int, int, int]:
        """First row, last row and the position of the first, from the length of the sequence."""
        num_rows, start = len(ids), request.start or 0
        expected = num_tokens - 1 - start
        if num_rows == expected:
            self.cut["last"] += 1
            self.cut["stated start"] += start
            return 0, num_rows, start
        if num_rows > expected:
            return 0, self._end_of_tokens(ids, empty, num_tokens, start), start
        missing = expected - num_rows
        proofs = {
            "cached": request.num_omitted,
            "generation": request.num_prompt,
            "generation, and the last token of the prompt": (request.num_prompt or 0) - 1,
        }
        for kind, length in proofs.items():
            if length == missing and not start:
                self.cut["last"] += 1
                self.cut[kind] += missing
                if kind != "cached":
                    self._missing.append(np.ones(missing, bool))
                return 0, num_rows, missing
        prompt = "" if request.num_prompt is None else f" ({request.num_prompt} of the prompt)"
        raise RecordingError(
            f"{self._where} has {number_of(num_rows, 'row')} for "
            f"{number_of(num_tokens, 'token')}{prompt}; expected {expected}, "
            f"since an engine never routes the last token{f', from {start} on' if start else ''}.",
            f"{number_of(missing, 'row is', 'rows are')} missing and nothing in the file says "
            "which: have the engine tell how many it took from its cache, or switch omission of "
            "cached prefixes off.",
        )

    def _end_of_tokens(
        self, ids: np.ndarray, empty: np.ndarray, num_tokens: int, start: int
    ) -> int:
        """The end of the rows that are tokens, where there are more rows than routed tokens."""
        num_rows, expected = len(ids), num_tokens - start
        surplus = slice(expected - 1, num_rows)
        padded = empty[surplus] | _counts_up(ids[surplus], self._routers)
        padded |= _repeats_neighbour(ids)[surplus]
        if padded.all():
            self.cut["last"] += 1
            self.cut["surplus"] += num_rows - expected + 1
            return expected - 1
        raise RecordingError(
            f"{self._where} has {number_of(num_rows, 'row')} for {number_of(num_tokens, 'token')}"
            f"{f' from {start} on' if start else ''}; expected {expected - 1}, and the "
            f"{num_rows - expected + 1} at the end look like choices.",
            "An engine never routes the last token that it sampled: the rows are of another "
            "request, or of a longer answer that was cut off.",
        )

    def _add_missing(self, ids: np.ndarray, empty: np.ndarray, tokens: slice) -> None:
        """Keeps which of the tokens of a part hold no choices, and what stands there."""
        self._empty.add(empty[tokens])
        self._missing.append(empty[tokens])
        if empty[tokens].any():
            values = np.unique(ids[tokens][empty[tokens]])
            value = int(values[0]) if len(values) == 1 else SEVERAL
            self._filling = value if self._filling in (ABSENT, value) else SEVERAL

    def _count_looks(self, chosen: np.ndarray) -> None:
        """Counts what looks like padding, and runs of equal rows, also across parts."""
        if not len(chosen):
            return
        same = _repeats_neighbour(chosen)
        if self._before is None:
            self._first_slots = chosen[0, 0]
        else:
            same[0] = np.array_equal(chosen[0], self._before)
        if self._num_repeats == max(self._same.num - 1, 0):
            behind = same[self._before is None :]
            self._num_repeats += int(np.argmin(behind)) if not behind.all() else len(behind)
        self._last_slots = chosen[-1, 0]
        self._before = chosen[-1].copy()
        self._pattern.add(_counts_up(chosen, self._routers))
        self._num_stale += self._same.add(same)

    def finish(self) -> None:
        """Ends the request.

        Raises
        ------
        RecordingError
            When rows look like padding and nothing proves it.
        """
        empty = self._empty
        missing = np.concatenate([np.zeros(0, bool), *self._missing])
        self._num_stale += self._same.end()
        self.gap: Gap = gap_of(
            missing,
            self._prompt,
            self._num_repeats,
            self._num_stale,
            self._filling,
            self._is_counted,
        )
        self.cut["pairs"] += max(self._same.num - 1, 0)
        self.cut["repeats"] += self._same.num_set
        if empty.num_set == empty.num:
            self.cut["unrecorded requests"] += 1
            self.cut["unrecorded"] += empty.num
        else:
            self.cut["leading"] += empty.leading
            self.cut["trailing"] += empty.trailing
            self.cut["inside"] += empty.num_set - empty.leading - empty.trailing
        self._refuse_padding()
        # unless most rows are equal anyway
        if len(self._routers) > 1 and 2 * self._same.num_set <= self._same.num:
            self.cut["stale"] += self._num_stale

    def _refuse_padding(self) -> None:
        """Raises RecordingError where rows at either end count up in every layer by no accident."""
        run = max(self._pattern.leading, self._pattern.trailing)
        if is_no_accident(run, self._routers):
            example = self._first_slots if self._pattern.leading else self._last_slots
            raise RecordingError(
                f"{self._where}: {number_of(run, 'row at an end holds', 'rows at an end hold')} "
                f"experts that count up by one in {all_of(len(self._routers), 'layer')}, such as "
                f"{example.tolist()}: padding written as experts.",
                "Store the token ids or a mask beside the ids; with them such rows are cut.",
            )


def is_no_accident(run: int, routers: Sequence[KnownRouter]) -> bool:
    """Whether so many rows that count up in every layer are padding, and no choices by chance."""
    if not run:
        return False
    one_row = sum(
        math.log10(r.num_experts) - math.log10(math.perm(r.num_experts, r.top_k)) for r in routers
    )
    return run * one_row < _LOG10_ACCIDENT


class _Flags:
    """Counts of row flags that come in parts: set in all, at either end, and in long runs."""

    def __init__(self) -> None:
        self.num = self.num_set = self.leading = self.trailing = 0

    def add(self, flags: Bool[np.ndarray, "rows"]) -> int:
        """Adds a part; flags in long runs that ended in it."""
        if not len(flags):
            return 0
        if not flags.any():
            ended, self.trailing = _if_long(self.trailing), 0
            self.num += len(flags)
            return ended
        num_ahead = int(np.argmin(flags)) if not flags.all() else len(flags)
        if self.leading == self.num:
            self.leading += num_ahead
        self.num += len(flags)
        self.num_set += int(flags.sum())
        if num_ahead == len(flags):
            self.trailing += num_ahead
            return 0
        ended = _if_long(self.trailing + num_ahead)
        self.trailing = int(np.argmin(flags[::-1]))
        rest = flags[num_ahead : len(flags) - self.trailing]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], rest, [False]]).astype(np.int8)))
        lengths = edges[1::2] - edges[::2]
        return ended + int(lengths[lengths + 1 >= _STALE_RUN].sum())

    def end(self) -> int:
        """Flags in a long run at the end."""
        return _if_long(self.trailing)


def _if_long(length: int) -> int:
    return length if length + 1 >= _STALE_RUN else 0


def _empty_rows(ids: np.ndarray) -> Bool[np.ndarray, "rows"]:
    """Rows that say nothing in any layer: one number in all slots, which no choice can be."""
    if ids.shape[2] == 1:
        return _in_every_layer(ids, lambda part: part[:, 0] == unset_value(ids.dtype))
    return _in_every_layer(ids, lambda part: (part == part[:, :1]).all(axis=1))


def _in_every_layer(
    ids: np.ndarray, holds: Callable[[np.ndarray], np.ndarray]
) -> Bool[np.ndarray, "rows"]:
    """Rows for which something holds in every layer: tried in the first, and of those few in the
    others.
    """
    candidates = np.arange(len(ids))
    for layer in range(ids.shape[1]):
        part = ids[:, layer] if len(candidates) == len(ids) else ids[candidates, layer]
        candidates = candidates[holds(part)]
        if not len(candidates):
            break
    return _flags_at(candidates, len(ids))


def _counts_up(ids: np.ndarray, routers: Sequence[KnownRouter]) -> Bool[np.ndarray, "rows"]:
    """Rows that count up by one in every layer, modulo the number of experts: written padding."""
    if ids.shape[2] == 1:
        return np.zeros(len(ids), bool)
    # of each layer in turn
    num_experts = iter([router.num_experts for router in routers])
    return _in_every_layer(
        ids,
        lambda part: (np.diff(part.astype(np.int64), axis=1) % next(num_experts) == 1).all(axis=1),
    )


def _repeats_neighbour(ids: np.ndarray) -> Bool[np.ndarray, "rows"]:
    """Rows that equal the one before them in every layer."""
    candidates = np.arange(1, len(ids))
    for layer in range(ids.shape[1]):
        equal = ids[candidates, layer] == ids[candidates - 1, layer]
        candidates = candidates[equal.all(axis=1)]
        if not len(candidates):
            break
    return _flags_at(candidates, len(ids))


def _flags_at(indices: np.ndarray, length: int) -> Bool[np.ndarray, "length"]:
    flags = np.zeros(length, bool)
    flags[indices] = True
    return flags
