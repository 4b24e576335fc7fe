"""Recording faults: expert ids renumbered, rows shifted, rows missing."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Float, Int32, Int64, Integer, UInt64
from moegeom.geometry.rows import common_choices, expert_matching
from moegeom.studies.faults.operator import Operator, Proposal, Site, of_sets

#: Tokens by which rows may stand too far, how many of these shifts are tried in full, and layers.
_FAR, _TRIED, _MOST_SHIFT = 512, 4, 8

#: Shifts by document are fitted: they have to meet this share of the sets. Heuristic.
_SOME = 0.3

#: B's most frequent set is a fill value where it makes up this share of the differing rows, at
#: least so many tokens, and A hardly ever chose it.
_ONE_SET, _LEAST = 0.02, 5

#: A copy of something is equal to it, but for a token at the border of where it is.
_EXACT = 0.9


def _renamed(site: Site) -> Iterator[Proposal]:
    """Best renumbering of experts over all tokens, and over differing tokens only."""
    experts = len(site.matching)
    differs = site.differs
    of_others = expert_matching(common_choices(site.mine[differs], site.theirs[differs], experts))
    for name, matching, words in (
        ("renamed", site.matching, "best matching"),
        ("renamed_where_different", of_others, "best matching where sets differ"),
    ):
        moved = int((matching != np.arange(experts)).sum())
        if moved:
            numbers = np.argsort(matching).astype(np.int32)
            bits = moved * math.log2(experts)
            text = f"experts renamed ({words})"
            yield Proposal(name, text, "experts renamed", own_bits=bits, numbers=numbers)


RENAMED = Operator("renamed", _renamed)


def _shifted(site: Site) -> Iterator[Proposal]:
    """Rows shifted by the lag at which B's sets most often equal A's."""
    lags, agree = _agreements(site)
    best = np.argsort(-agree.sum(axis=1), kind="stable")[:_TRIED]
    for by in lags[best[agree.sum(axis=1)[best] > 0]].tolist():
        way = "after" if by > 0 else "before"
        text = f"rows of the token {abs(by)} {way}"
        yield Proposal(
            f"tokens{by:+d}", text, "tokens shifted", math.log2(len(lags)),
            rows=site.shifted(by), stands_for=len(lags) // _TRIED,
        )  # fmt: skip
    documents = agree.shape[1]
    own = lags[agree.argmax(axis=0)]
    if len(np.unique(own)) > _TRIED:  # as padding in front does, of documents of any lengths
        document = _number(site.columns.document)
        rows = np.full(len(document), -1, np.int64)
        for by in np.unique(own):
            of_these = own[document] == by
            rows[of_these] = site.shifted(int(by))[of_these]
        bits = documents * math.log2(len(lags))
        text = "rows shifted in each document by a number of its own, as by padding in front"
        yield Proposal("tokens_own", text, "tokens shifted", bits, rows=rows, least_met=_SOME)


def _agreements(site: Site) -> tuple[Int64[np.ndarray, "lags"], Int64[np.ndarray, "lags docs"]]:
    """Differing tokens that hold A's set of the token at each lag, counted by document.

    Lags by which a token of another document would be meant count nowhere.
    """
    document = _number(site.columns.document)
    number = int(document.max()) + 1
    longest = int(np.bincount(document).max())
    lags = np.array([by for by in range(-_FAR, _FAR + 1) if by and abs(by) < longest], np.int64)
    mine, theirs = _names(site.mine), _names(site.theirs)
    rows = np.flatnonzero(mine != theirs)
    counts = np.zeros((len(lags), number), np.int64)
    for place, by in enumerate(lags):
        there = rows + by
        inside = (there >= 0) & (there < len(mine))
        at, other = rows[inside], there[inside]
        same = (mine[other] == theirs[at]) & (document[other] == document[at])
        counts[place] = np.bincount(document[at[same]], minlength=number)
    return lags, counts


def _number(document: Integer[np.ndarray, "tokens"]) -> Int64[np.ndarray, "tokens"]:
    return np.unique(document, return_inverse=True)[1].ravel().astype(np.int64)


def _names(sets: Int32[np.ndarray, "tokens k"]) -> UInt64[np.ndarray, "tokens"]:
    """A number for each set, the same for equal ones; for others too, once in 2^64 pairs."""
    draws = np.random.default_rng(0).integers(1, 2**63, int(sets.max(initial=0)) + 2, np.uint64)
    return draws[sets].sum(axis=1, dtype=np.uint64)


TOKENS_SHIFTED = Operator("tokens_shifted", _shifted)


def _layers(site: Site) -> Iterator[Proposal]:
    for number, other in enumerate(site.routers):
        apart = number - site.number
        if not apart or abs(apart) > _MOST_SHIFT:
            continue
        if other.rule.top_k != site.theirs.shape[1] or other.num_experts != len(site.matching):
            continue
        chosen = site.chosen_at(number)

        def scores(there: Site, rows: np.ndarray, chosen: np.ndarray = chosen) -> np.ndarray:
            return of_sets(chosen[rows], len(there.matching), np.ones(len(rows), bool))

        text = f"choices of the layer {abs(apart)} {'further on' if apart > 0 else 'before'}"
        yield Proposal(f"layers{apart:+d}", text, "layers shifted", 4.0, scores=scores)


LAYERS_SHIFTED = Operator("layers_shifted", _layers)


def _repeated(site: Site) -> Iterator[Proposal]:
    """Repeated rows: B's record of a token is that of the token before."""
    before = site.shifted(-1)
    has_before = before >= 0
    if not has_before.any():
        return
    row = np.maximum(before, 0)
    sets = site.theirs[row]

    def values(there: Site, rows: np.ndarray) -> np.ndarray:
        assert there.recorded is not None
        return np.where(has_before[rows, None], there.recorded.values[row[rows]], np.nan)

    def scores(there: Site, rows: np.ndarray) -> np.ndarray:
        return of_sets(sets[rows], len(there.matching), has_before[rows])

    text = "a row of B again (that of the token before)"
    yield Proposal(
        "repeated", text, "rows repeated", 1.0, scores=scores, values=values, least_met=_EXACT
    )


REPEATED = Operator("repeated", _repeated)


def _one_set(site: Site) -> Iterator[Proposal]:
    differs = site.differs
    rows = np.sort(site.theirs[differs], axis=1)
    if len(rows) < _LEAST:
        return
    sets, counts = np.unique(rows, axis=0, return_counts=True)
    most = int(counts.argmax())
    if counts[most] < max(_LEAST, _ONE_SET * len(rows)):
        return

    def scores(there: Site, rows: np.ndarray) -> np.ndarray:
        one = np.broadcast_to(sets[most], (len(rows), sets.shape[1]))
        return of_sets(one, len(there.matching), np.ones(len(rows), bool))

    bits = sets.shape[1] * math.log2(len(site.matching))
    named = ", ".join(map(str, sets[most].tolist()[:8]))
    text = f"one and the same set ({named})"
    yield Proposal(
        "one_set", text, "padding counted", own_bits=bits, scores=scores,
        least_met=_EXACT, everywhere=True,
    )  # fmt: skip


ONE_SET = Operator("one_set", _one_set)


#: Integers that are too narrow for many experts: bits that are kept, or the largest number.
_NARROW = {
    "cut to 7 bits, as in int8": lambda numbers: numbers & 0x7F,
    "cut to 8 bits, as in uint8": lambda numbers: numbers & 0xFF,
    "127 at most, as in int8": lambda numbers: np.minimum(numbers, 127),
    "255 at most, as in uint8": lambda numbers: np.minimum(numbers, 255),
}


def _narrow(site: Site) -> Iterator[Proposal]:
    """Expert ids truncated by a narrow integer type, so that several experts share an id."""
    numbers = np.arange(len(site.matching))
    for words, narrowed in _NARROW.items():
        name = narrowed(numbers)
        if np.array_equal(name, numbers):
            continue

        def scores(there: Site, rows: np.ndarray, name: np.ndarray = name) -> np.ndarray:
            return _best_of(there.selection[rows], name)

        def values(there: Site, rows: np.ndarray, name: np.ndarray = name) -> np.ndarray:
            assert there.recorded is not None
            each = _best_of(there.recorded.of_each(there.router, there.logits[rows]), name)
            expert = there.recorded.experts(there.theirs[rows], each.shape[1])
            return np.take_along_axis(each, expert, axis=1).astype(np.float64)

        text = f"numbers of experts {words}"
        yield Proposal(
            f"narrow {words}", text, "experts renamed", 2.0, scores=scores, values=values
        )


def _best_of(
    scores: Float[np.ndarray, "tokens experts"], name: Int64[np.ndarray, "experts"]
) -> Float[np.ndarray, "tokens experts"]:
    """The best score among the experts that share each id."""
    best = np.full_like(scores, -np.inf)
    for expert, number in enumerate(name):
        best[:, number] = np.maximum(best[:, number], scores[:, expert])
    return best


NARROW = Operator("narrow", _narrow)


def _one_more(site: Site) -> Iterator[Proposal]:
    """Top-(k + 1) choices of which the k lowest ids are written."""
    k, experts = site.theirs.shape[1], len(site.matching)
    if not site.has_logits or k + 1 >= experts:
        return
    best = np.argpartition(site.selection, experts - k - 1, axis=1)[:, experts - k - 1 :]
    lowest = np.sort(best, axis=1)[:, :k]

    def scores(there: Site, rows: np.ndarray) -> np.ndarray:
        return of_sets(lowest[rows], experts, np.ones(len(rows), bool))

    text = f"top {k + 1} chosen, the {k} of lowest number written"
    yield Proposal("one_more", text, "rule differs", 2.0, scores=scores)


ONE_MORE = Operator("one_more", _one_more)
