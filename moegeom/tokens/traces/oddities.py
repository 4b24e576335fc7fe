"""What a whole trace lacks, or holds in place of choices: told by its pattern, over all requests.

1. A request has tokens without a row of choices: ``Gap`` says which, as a pattern of its rows.
2. Requests with one pattern are one ``Oddity``, with the requests that have it as a pattern too.
3. Ids that are those of one rank, and rows a, a + 1, .. where tokens are, show in sums over all.
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

#: A request of which one row in four is in long runs of equal ones is no text, if most are so.
_STALE_SHARE = 4

#: What is not by chance below this probability; of the first experts in order, which a model may
#: favour, one layer of 32 experts that choose 4 is enough.
_LOG10_CHANCE, _LOG10_FAVOUR = -9.0, -4.0

#: Slots from which on their order says something; rows a, a + 1, .. from which on they are told,
#: and their least share of rows that begin so.
_LEAST_SLOTS, _LEAST_ROWS, _LEAST_SHARE = 3, 5, 0.9

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
        "rows repeat the row before them",
        "long runs of equal rows",
        "One row was written again and again: the engine did not capture these steps. Text that "
        "repeats one token looks alike.",
    ),
    Pattern(
        "rows of prompts repeat one row",
        "equal rows in the place of the prompts",
        "One row was written for the whole prompt: have the engine return the prompt's routing.",
    ),
)
_PROMPT, _BEGINNING, _END, _MIDDLE, _PERIODIC, _RUNS, _ALL, _STALE, _COPIES = range(
    1, len(_PATTERNS)
)


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
    num_stale: int = 0,
    value: int = ABSENT,
    is_counted: bool = True,
) -> Gap:
    """The gap of a request of which some tokens have no choices, ``num_prompt`` are its prompt and
    the first ``num_repeats`` rows behind the first are equal to it; ``num_stale`` rows in long runs
    are equal to the one before them.

    Where tokens were not counted, rows without choices at the end may be padding: they are none.
    """
    is_padded = not is_counted and len(is_empty) > 0
    flags = is_empty[: len(is_empty) - int(np.argmin(is_empty[::-1]))] if is_padded else is_empty
    if not is_empty.any() or not len(flags):
        copied = num_repeats + 1 if num_repeats > 1 else 0
        is_prompt = copied >= _TIMES and num_prompt in (copied, copied + 1)
        is_copied = is_prompt or (num_prompt is None and copied >= 10)
        pattern, number = (_COPIES, copied) if is_copied else (0, 0)
        if not is_copied and _STALE_SHARE * num_stale >= len(is_empty) > 0:
            pattern, number = _STALE, num_stale
        return Gap(pattern, number, len(is_empty), is_counted=is_counted)
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
    is_equal = pattern >= _STALE
    copies = int((gaps[is_equal, 1] - (pattern[is_equal] == _COPIES)).sum())
    is_few = 2 * (pattern == _STALE).sum() < len(pattern)
    if not _is_copied(copies, cut):
        pattern = np.where(is_equal, 0, pattern)
    pattern = np.where((pattern == _STALE) & is_few, 0, pattern)
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


def runs_of_experts(
    ids: Integer[np.ndarray, "rows layers slots"], num_experts: int
) -> Int64[np.ndarray, "layers+1 num_experts 4"]:
    """Of each layer, by the first expert a: rows a, a + 1, .. to the end, rows a, a - 1, .., and
    rows that begin so. In the last line, of the first rows, those that ascend, those that descend,
    and their number.
    """
    rows, layers, slots = ids.shape
    counts = np.zeros((layers + 1, num_experts, 4), np.int64)
    if slots < _LEAST_SLOTS or not rows:
        return counts
    first, second = ids[:, :, 0], ids[:, :, 1]
    for way, is_begun in enumerate((second - first == 1, first - second == 1)):
        row, layer = np.nonzero(is_begun)
        own = ids[row, layer].astype(np.int64)
        is_run = (np.diff(own, axis=1) == 1 - 2 * way).all(axis=1)
        begun = layer * num_experts + own[:, 0]
        for column, places in ((way, begun[is_run]), (2 + way, begun)):
            of_place = np.bincount(places, minlength=layers * num_experts)
            counts[:-1, :, column] = of_place.reshape(layers, num_experts)
    steps = np.diff(ids[:64].reshape(-1, slots).astype(np.int64), axis=1)
    counts[-1, 0, :3] = (steps > 0).all(axis=1).sum(), (steps < 0).all(axis=1).sum(), len(steps)
    return counts


def sparse(counts: Int64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "entries columns"]:
    """The counts that are not 0, behind their places."""
    return np.column_stack([np.argwhere(counts), counts[counts != 0]])


def dense(
    entries: Int64[np.ndarray, "entries columns"], *shape: int
) -> Int64[np.ndarray, "*shape"]:
    """The sums of counts behind their places."""
    counts = np.zeros(shape, np.int64)
    np.add.at(counts, tuple(entries[:, :-1].T), entries[:, -1])
    return counts


def runs_oddity(
    counts: Int64[np.ndarray, "layers_and_end experts 4"],
    routers: Sequence[KnownRouter],
    num_tokens: int,
) -> Iterator[Oddity]:
    """Rows a, a + 1, .. that are no choices: where the order of slots says something, what begins
    so nearly always goes on so, and so many layers favour one such row by no accident.
    """
    *sorted_rows, looked_at = counts[-1, 0, :3].tolist()
    top_k = routers[0].top_k
    runs = counts[:-1, :, :2]
    is_odd = (runs >= _LEAST_ROWS) & (runs >= _LEAST_SHARE * counts[:-1, :, 2:])
    for way, is_sorted in enumerate(sorted_rows):
        if 2 * is_sorted > looked_at * (1.0 + 1.0 / math.factorial(top_k)):
            is_odd[:, :, way] = False
    if not is_odd.any():
        return
    num_rows = np.where(is_odd, runs, 0).sum(axis=0)
    start, way = (int(n) for n in np.unravel_index(int(num_rows.argmax()), num_rows.shape))
    odd = [r for r, flag in zip(routers, is_odd[:, start, way], strict=True) if flag]
    log10 = sum(math.log10(math.perm(router.num_experts, top_k)) for router in odd)
    if start or way:  # one of many such rows
        log10 -= math.log10(2 * routers[0].num_experts)
    if -log10 < _LOG10_FAVOUR:
        layers = format_layers({router.layer for router in odd})
        most = int(runs[:, start, way].max())
        example = (start + np.arange(top_k) * (1 - 2 * way)).tolist()
        yield Oddity(
            "experts in the order of their numbers stand in place of choices",
            f"{example} in this order in up to {most:,} of {num_tokens:,} rows "
            f"({percent(most / max(num_tokens, 1))}), layer {layers}: what top-k takes where all "
            "scores are equal.",
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
    sizes = [part_size(low, high, num_experts, least) for low, high, *_ in spans.tolist()]
    if 0 in sizes or sizes != spans[:, 2].tolist():  # not seen whole
        return
    size = max(sizes)
    ranges = [f"{low}-{high}" for low, high in np.unique(spans[:, :2], axis=0).tolist()]
    each = f" in each of {len(spans)} files" if len(spans) > 1 else ""
    yield Oddity(
        "ids are those of one rank",
        f"all {int(spans[:, 3].sum()):,} ids lie in {listed(ranges, 4)}{each}, {size} of "
        f"{num_experts} experts: as many as one of {num_experts // size} ranks holds.",
        "Local ids of a rank: add its first expert to each, or record the ids before they are "
        "made local. Expert loads of this trace are wrong.",
    )


def part_size(low: int, high: int, num_experts: int, least: int) -> int:
    """Experts of the least part of all, cut evenly, that holds ids from low to high; 0 for none."""
    sizes = (n for n in range(least, num_experts // 2 + 1) if num_experts % n == 0)
    return next((size for size in sizes if low // size == high // size), 0)
