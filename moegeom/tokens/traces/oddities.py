"""What a whole trace lacks, or holds in place of choices: told by its pattern, over all requests.

1. A request has tokens without a row of choices: ``Gap`` says which, as a pattern of its rows.
2. Requests with one pattern are one ``Oddity``, with the requests that have it as a pattern too.
3. Ids that are those of one rank, and rows 0, 1, .. k-1 where tokens are, show in sums over all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moegeom.core.router import format_layers
from moegeom.core.shapes import Bool, Int64, Integer
from moegeom.core.text import listed, number_of, percent
from moegeom.core.tokens import Oddity
from moegeom.tokens.source import KnownRouter

#: Where nothing, or no single number, stands in the place of choices.
ABSENT, SEVERAL = -(2**40), -(2**40) + 1

#: Periods that are tried, of rows and of requests, and times that one must be seen.
_PERIODS, _TIMES = range(2, 65), 3

#: What is not by chance below this probability; of the first experts in order, which a model may
#: favour, one layer of 32 experts that choose 4 is enough.
_LOG10_CHANCE, _LOG10_FAVOUR = -9.0, -5.0

#: Rows 0, 1, .. k-1 from which on they are counted, and their least share of rows of these experts.
_LEAST_ROWS, _LEAST_SHARE = 5, 0.9

#: Ids from which on it is no accident that none lies beyond a part of the experts.
_MANY_IDS = 200


class Pattern(NamedTuple):
    """Which tokens of a request have no row: the words, and what to do."""

    word: str
    text: str
    hint: str


#: Patterns by number; 0 is none.
_PATTERNS = (
    Pattern("", "", ""),
    Pattern(
        "rows of prompts are missing",
        "exactly the prompts",
        "Loads are those of generated tokens alone: have the engine return the prompt's routing "
        "too, or say in the file where rows begin.",
    ),
    Pattern(
        "first rows are missing",
        "the first rows",
        "A cached prefix, or prompts that were not captured: switch prefix caching off while you "
        "record, or let the file say how many positions it leaves out.",
    ),
    Pattern(
        "last rows are missing",
        "the last rows",
        "Requests that were preempted or aborted: record again with room for all of them in the "
        "cache.",
    ),
    Pattern(
        "rows between others are missing",
        "one run of rows between others",
        "Requests that were preempted and taken up again, or text of tools that was not captured: "
        "record without preemption.",
    ),
    Pattern(
        "rows are missing in turn",
        "rows in turn, {turn}",
        "One rank of those that share a sequence was not gathered: gather all of them.",
    ),
    Pattern(
        "rows here and there are missing",
        "rows in several runs",
        "Rows were lost while the engine wrote them: record again.",
    ),
    Pattern(
        "whole requests are missing",
        "every row",
        "Requests that were preempted, or of a rank that does not capture: record them again.",
    ),
    Pattern(
        "rows of prompts repeat one row",
        "equal rows in the place of the prompts",
        "One row was written for the whole prompt: have the engine return the prompt's routing.",
    ),
)
_PROMPT, _BEGINNING, _END, _MIDDLE, _PERIODIC, _RUNS, _ALL, _COPIES = range(1, len(_PATTERNS))


class Gap(NamedTuple):
    """What a request of ``length`` tokens lacks: a pattern by number, how many rows of how many.

    ``value`` fills the rows, ``period`` is that of rows in turn. ``is_counted`` says that tokens
    were counted: else rows at an end may be padding. A length of -1 is that of a request in a file
    that holds what another does.
    """

    pattern: int = 0
    num_missing: int = 0
    length: int = 0
    period: int = 0
    value: int = ABSENT
    is_counted: bool = False


def gap_of(
    is_empty: Bool[np.ndarray, "tokens"],
    num_prompt: int | None,
    num_repeats: int = 0,
    value: int = ABSENT,
    is_counted: bool = True,
) -> Gap:
    """The gap of a request of which some tokens have no choices, ``num_prompt`` are its prompt and
    the first ``num_repeats`` rows behind the first are equal to it.

    Where tokens were not counted, rows without choices at the end may be padding: they are none.
    """
    flags = is_empty if is_counted else is_empty[: len(is_empty) - int(np.argmin(is_empty[::-1]))]
    if not is_empty.any() or not len(flags):
        copied = num_repeats + 1 if num_repeats > 1 else 0
        is_prompt = copied >= _TIMES and num_prompt in (copied, copied + 1)
        is_copied = is_prompt or (num_prompt is None and copied >= 10)
        shown = (_COPIES, copied) if is_copied else (0, 0)
        return Gap(*shown, len(is_empty), is_counted=is_counted)
    number, period = int(flags.sum()), 0
    if is_empty.all():
        pattern, number = _ALL, len(is_empty)
    elif not number:
        pattern = 0
    elif flags[:number].all():
        ends = () if num_prompt is None else (num_prompt, num_prompt - 1)
        pattern = _PROMPT if number in ends else _BEGINNING
    elif flags[-number:].all():
        pattern = _END
    elif period := period_of(flags):
        pattern = _PERIODIC
    else:
        first = int(np.argmax(flags))
        pattern = _MIDDLE if flags[first : first + number].all() else _RUNS
    return Gap(pattern, number, len(is_empty), period, value, is_counted)


def period_of(flags: Bool[np.ndarray, "places"]) -> int:
    """The least p with :math:`f_i = f_{i+p}` for all i, seen three times at least; 0 for none."""
    for period in _PERIODS:
        if _TIMES * period > len(flags):
            break
        if np.array_equal(flags[period:], flags[:-period]):
            return period
    return 0


def gap_oddities(
    gaps: Int64[np.ndarray, "requests 6"],
    has_documents: bool,
    cut: Mapping[str, int],
    num_experts: int,
) -> Iterator[Oddity]:
    """An oddity for each pattern that requests have."""
    gaps = gaps[gaps[:, 2] >= 0]
    pattern, _, length, _, _, is_counted = gaps.T
    bare = is_counted == 0
    if not has_documents:  # a batch may be padded anywhere but in turn
        pattern = np.where(bare & (pattern != _PERIODIC), 0, pattern)
    elif bare.any() and (pattern[bare] != _BEGINNING).any() and np.ptp(length[bare]) == 0:
        pattern = np.where(bare & (pattern == _BEGINNING), 0, pattern)  # padded on the left
    copies = int((gaps[pattern == _COPIES, 1] - 1).sum())
    if not _is_copied(copies, cut):
        pattern = np.where(pattern == _COPIES, 0, pattern)
    for number in np.unique(pattern[pattern > 0]).tolist():
        of_kind = pattern == number
        rows = gaps[of_kind]
        word, text, hint = _PATTERNS[number]
        turns = {_turn(missing / length, p) for _, missing, length, p, *_ in rows.tolist()}
        missing, total = int(rows[:, 1].sum()), int(length.sum())
        yield Oddity(
            word,
            f"{missing:,} of {number_of(total, 'row')} ({percent(missing / total)}), in "
            f"{len(rows):,} of {number_of(len(gaps), 'request')}{_which(of_kind)}: "
            f"{text.format(turn=listed(sorted(turns), 3))}"
            f"{_filling(np.unique(rows[:, 4]).tolist(), num_experts)}.",
            hint,
        )


def _is_copied(copies: int, cut: Mapping[str, int]) -> bool:
    """Whether rows elsewhere repeat so seldom that these at the beginning are no accident."""
    rate = (cut.get("repeats", 0) - copies + 1) / (cut.get("pairs", 0) - copies + 2)
    return copies * math.log10(rate) < _LOG10_CHANCE


def _which(of_kind: Bool[np.ndarray, "requests"]) -> str:
    """Which requests these are, where that is a pattern too."""
    at = np.flatnonzero(of_kind)
    if len(at) == len(of_kind) or len(at) < _TIMES:
        return ""
    if period := period_of(of_kind):
        return f", {_turn(of_kind.mean(), period)} (one of {period} ranks?)"
    is_run = at[-1] - at[0] + 1 == len(at)
    return f", from the {at[0] + 1:,}. to the {at[-1] + 1:,}. in the file" if is_run else ""


def _turn(share: float, period: int) -> str:
    return f"{max(1, round(share * period))} of every {period}"


def _filling(values: Sequence[int], num_experts: int) -> str:
    if len(values) > 1 or values[0] in (ABSENT, SEVERAL):
        return ""
    nan = ", as kernels write for rows of NaN" if values[0] == num_experts else ""
    return f", filled with {values[0]}{nan}"


def without_ids(words: str, number: int, num_requests: int) -> Oddity:
    """What a file has beside its requests that should hold choices, and does not."""
    return Oddity(
        _PATTERNS[_ALL].word,
        f"{words}: {number:,}, beside {number_of(num_requests, 'request')} with rows.",
        _PATTERNS[_ALL].hint,
    )


# --------------------------------------------------------------------------------------------- ids


def first_experts(ids: Integer[np.ndarray, "rows layers slots"]) -> Int64[np.ndarray, "layers+1 3"]:
    """Of each layer: rows 0, 1, .. k-1 in this order, rows of these experts, and of the first rows
    those that ascend (their number stands in the last line).
    """
    rows, layers, slots = ids.shape
    counts = np.zeros((layers + 1, 3), np.int64)
    if slots < 2 or not rows:
        return counts
    row, layer = np.nonzero(ids[:, :, 0] < slots)
    own = ids[row, layer]
    is_set = (own < slots).all(axis=1)
    own, layer = own[is_set], layer[is_set]
    is_ordered = (own == np.arange(slots)).all(axis=1)
    counts[:-1, 0] = np.bincount(layer[is_ordered], minlength=layers)
    counts[:-1, 1] = np.bincount(layer, minlength=layers)
    first = ids[:64].reshape(-1, slots)
    counts[-1, :2] = (first[:, :-1] < first[:, 1:]).all(axis=1).sum(), len(first)
    return counts


def first_experts_oddity(
    counts: Int64[np.ndarray, "layers_and_end 3"], routers: Sequence[KnownRouter], num_tokens: int
) -> Iterator[Oddity]:
    """Rows 0, 1, .. k-1 that are no choices: where the order of slots says something, it is always
    the same, and so many layers favour the first experts by no accident.
    """
    ascending, looked_at = counts[-1, :2]
    top_k = routers[0].top_k
    if top_k < 2 or 2 * ascending > looked_at * (1.0 + 1.0 / math.factorial(top_k)):
        return
    ordered, of_set = counts[:-1, 0], counts[:-1, 1]
    is_odd = (ordered >= _LEAST_ROWS) & (ordered >= _LEAST_SHARE * of_set)
    odd = [router for router, flag in zip(routers, is_odd, strict=True) if flag]
    log10 = [math.log10(math.perm(r.num_experts, r.top_k)) for r in odd]
    if -sum(log10) < _LOG10_FAVOUR:
        most, layers = int(ordered.max()), format_layers({router.layer for router in odd})
        yield Oddity(
            "the first experts in order stand in place of choices",
            f"[{listed(range(top_k))}] in this order in up to {most:,} of {num_tokens:,} rows "
            f"({percent(most / max(num_tokens, 1))}) of a layer, layer {layers}: what top-k "
            "takes where all scores are equal.",
            "Look at the scores there: NaN, or groups that were left out and won all the same. "
            "Padding has no such rows where a mask or token ids say that it is a token.",
        )


class IdRange:
    """The range of ids, and which of them there are while it may be that of one rank."""

    def __init__(self, num_experts: int) -> None:
        self._low, self._high, self._number = num_experts, -1, 0
        self._is_seen = np.zeros(num_experts, bool)

    def add(self, ids: Integer[np.ndarray, "rows layers slots"]) -> None:
        """Ids of more rows."""
        if not ids.size:
            return
        self._number += ids.size
        self._low = min(self._low, int(ids.min()))
        self._high = max(self._high, int(ids.max()))
        if 2 * (self._high - self._low) < len(self._is_seen):
            self._is_seen[ids[ids < len(self._is_seen)]] = True

    @property
    def span(self) -> Int64[np.ndarray, "4"]:
        """The least, the largest, how many different ones, and how many in all."""
        return np.array([self._low, self._high, self._is_seen.sum(), self._number], np.int64)


def rank_oddity(
    spans: Int64[np.ndarray, "files 4"], routers: Sequence[KnownRouter]
) -> Iterator[Oddity]:
    """Ids that lie in one part of the experts, as large as that of a rank, in each file."""
    num_experts = min(router.num_experts for router in routers)
    spans = spans[spans[:, 3] > 0]
    if not len(spans) or spans[:, 3].min() < _MANY_IDS:
        return
    least = max(2, routers[0].top_k)
    parts = [_part(low, high, num, num_experts, least) for low, high, num, _ in spans.tolist()]
    if None in parts:
        return
    size = max(part[1] for part in parts if part)
    ranges = [f"{low}-{high}" for low, high in np.unique(spans[:, :2], axis=0).tolist()]
    each = f" in each of {len(spans)} files" if len(spans) > 1 else ""
    yield Oddity(
        "ids are those of one rank",
        f"all {int(spans[:, 3].sum()):,} ids lie in {listed(ranges, 4)}{each}, {size} of "
        f"{num_experts} experts: as many as one of {num_experts // size} ranks holds.",
        "Local ids of a rank: add its first expert to each, or record the ids before they are "
        "made local. Expert loads of this trace are wrong.",
    )


def _part(
    low: int, high: int, num_seen: int, num_experts: int, least: int
) -> tuple[int, int] | None:
    """The least part of all experts, cut evenly, that holds the ids and is seen whole."""
    for size in range(least, num_experts // 2 + 1):
        if num_experts % size == 0 and low // size == high // size:
            return (low // size, size) if num_seen == size else None
    return None
