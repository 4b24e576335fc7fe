"""What is written: ids renumbered or cut, rows shifted or repeated, experts full or the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Bool, Float, Int32, Int64, Integer, UInt64
from moegeom.geometry.rows import common_choices, expert_matching
from moegeom.geometry.set_code import chosen_mask
from moegeom.studies.faults.operator import Proposal, Site, of_sets, operator

#: Tokens by which rows may stand too far, and how many of these shifts are tried in full.
_FAR, _TRIED = 512, 4

#: Shifts by document are fitted: they have to meet this share of the sets. Heuristic.
_SOME = 0.3

#: Positions that are shifted alike where a shift changes along the text, and sizes of chunks.
_STRETCH, _CHUNKS = 16, (2, 4, 8, 16, 32, 64)

#: Tokens after which a row may be lost.
_LOST_EVERY = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)

#: Sizes of a shift along a document, and the share of its steps that make it larger. Heuristic.
_STEPS, _MOSTLY = 2, 0.8

#: B's most frequent set is a fill value where it makes up this share of the differing rows, at
#: least so many tokens, and A hardly ever chose it.
_ONE_SET, _LEAST = 0.02, 5

#: Bits by which padding, which is in every layer, comes before scores that are equal.
_OF_TIES = 40.0

#: A copy of something is equal to it, but for a token at the border of where it is.
_EXACT = 0.9


@operator
def renamed(site: Site) -> Iterator[Proposal]:
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


@operator
def tokens_shifted(site: Site) -> Iterator[Proposal]:
    """Rows shifted by the lag at which B's sets most often equal A's."""
    lags, agree = _agreements(site)
    best = np.argsort(-agree.sum(axis=1), kind="stable")[:_TRIED]
    for by in lags[best[agree.sum(axis=1)[best] > 0]].tolist():
        text = f"rows of the token {abs(by)} {'after' if by > 0 else 'before'}"
        yield Proposal(
            f"tokens{by:+d}", text, "tokens shifted", math.log2(len(lags)),
            rows=site.shifted(by), stands_for=len(lags) // _TRIED,
        )  # fmt: skip
    document = site.document
    own = lags[agree.argmax(axis=0)]
    if len(np.unique(own)) > _TRIED:  # as padding in front does, of documents of any lengths
        text = "rows shifted in each document by a number of its own, as by padding in front"
        yield _shifted_by(site, "tokens_own", text, own, document, len(lags))
    position = np.maximum(site.columns.position.astype(np.int64), 0)
    lost = {every: -(position // every) for every in _LOST_EVERY}
    rows_of = {every: site.shifted_by(by) for every, by in lost.items()}
    mine, theirs = _names(site.mine), _names(site.theirs)
    met = {
        every: float(((mine[rows] == theirs) & (rows >= 0)).mean())
        for every, rows in rows_of.items()
    }
    every = max(met, key=met.__getitem__)
    text = f"rows one more token behind after every {every}"
    yield Proposal(
        "tokens_behind", text, "tokens shifted", 8.0, rows=rows_of[every], least_met=_SOME
    )
    # a number of its own for each stretch of a document: rows that slip, as by drafts
    stretch = np.cumsum(np.diff(document, prepend=0) != 0) * len(document)
    stretch = _number(stretch + np.maximum(site.columns.position, 0) // _STRETCH)
    lags, agree = _agreements(site, stretch)
    of_each = np.where(agree.max(axis=0) > 0, lags[agree.argmax(axis=0)], 0)
    if _slips(of_each, np.unique(np.c_[stretch, document], axis=0)[:, 1]):
        text = "rows shifted by a number that changes along the text, as by rejected drafts"
        yield _shifted_by(site, "tokens_slipping", text, of_each, stretch, len(lags))


def _slips(shift: Int64[np.ndarray, "parts"], document: Int64[np.ndarray, "parts"]) -> bool:
    """Whether shifts grow along documents, in several steps, in half of those that are shifted."""
    growing, shifted = 0, 0
    for number in np.unique(document):
        own = np.abs(shift[document == number])
        shifted += bool(own.any())
        growing += len(np.unique(own)) > _STEPS and bool((np.diff(own) >= 0).mean() > _MOSTLY)
    return growing > shifted // 2


def _shifted_by(
    site: Site,
    name: str,
    text: str,
    own: Int64[np.ndarray, "parts"],
    part: Int64[np.ndarray, "tokens"],
    num_lags: int,
) -> Proposal:
    """Rows shifted in each part by its own number."""
    rows = np.full(len(part), -1, np.int64)
    for by in np.unique(own):
        of_these = own[part] == by
        rows[of_these] = (site.shifted(int(by)) if by else site.place)[of_these]
    bits = int((own != 0).sum()) * math.log2(num_lags)
    return Proposal(name, text, "tokens shifted", bits, rows=rows, least_met=_SOME)


@operator
def other_documents(site: Site) -> Iterator[Proposal]:
    """Rows of another document at the same position: requests of one batch that changed places."""
    document, position = site.document, site.columns.position
    number = int(document.max()) + 1
    rows = np.flatnonzero(site.differs & (position >= 0))
    if number < 2 or not len(rows):
        return
    at = position.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mine, theirs = _names(site.mine) ^ at, _names(site.theirs) ^ at
    order = np.argsort(mine, kind="stable")
    first, last = (
        np.searchsorted(mine[order], theirs[rows], side=side) for side in ("left", "right")
    )
    count = np.zeros((number, number), np.int64)
    for further in range(_TRIED):  # the same set may stand in several documents
        some = first + further < last
        of_a = document[order[first[some] + further]]
        np.add.at(count, (document[rows[some]], of_a), 1)
    np.fill_diagonal(count, 0)
    differing = np.bincount(document[rows], minlength=number)
    own = np.where(count.max(axis=1) > _SOME * np.maximum(differing, 1), count.argmax(axis=1), -1)
    moved = np.flatnonzero(own >= 0)
    if not len(moved):
        return
    key = document * (int(position.max()) + 2) + position
    by_key = np.argsort(key, kind="stable")
    there = own[document] * (int(position.max()) + 2) + position
    place = np.minimum(np.searchsorted(key[by_key], there), len(key) - 1)
    is_there = (own[document] >= 0) & (key[by_key[place]] == there)
    row_of = np.where(is_there, by_key[place], -1)
    row_of = np.where(own[document] < 0, site.place, row_of)
    bits = len(moved) * 2.0 * math.log2(number)
    names = np.unique(site.columns.document)
    pairs = ", ".join(f"{names[i]} holds {names[own[i]]}" for i in moved[:4])
    text = f"rows of other documents ({pairs}{', ...' if len(moved) > 4 else ''})"
    yield Proposal("other_documents", text, "tokens shifted", bits, rows=row_of, least_met=_SOME)


@operator
def permuted_in_chunks(site: Site) -> Iterator[Proposal]:
    """Rows in another order within chunks of so many tokens, the same in every chunk."""
    position = site.columns.position.astype(np.int64)
    mine, theirs = _names(site.mine), _names(site.theirs)
    document, rows = site.columns.document, np.flatnonzero(site.differs & (position >= 0))
    best: tuple[float, int, np.ndarray] = (0.0, 0, position)
    for size in _CHUNKS:
        if len(rows) < size * 2:
            break
        count = np.zeros((size, size), np.int64)
        at = position[rows] % size
        for source in range(size):
            there = rows + source - at
            inside = (there >= 0) & (there < len(mine))
            own, other = rows[inside], there[inside]
            same = (mine[other] == theirs[own]) & (document[other] == document[own])
            count[:, source] = np.bincount(at[inside][same], minlength=size)
        share = float(count.max(axis=1).sum() / len(rows))
        order = np.where(count.max(axis=1) > 0, count.argmax(axis=1), np.arange(size))
        # the smallest of the chunks that explain as much
        best = max(best, (share, size, order), key=lambda one: one[0] - 0.001 * one[1])
    share, size, source = best
    if share < _SOME or len(np.unique(source)) < size or (source == np.arange(size)).all():
        return
    there = site.place + source[position % size] - position % size
    inside = (there >= 0) & (there < len(mine)) & (position >= 0)
    there = np.clip(there, 0, len(mine) - 1)
    inside &= document[there] == document
    text = f"rows in another order within each {size} positions"
    yield Proposal(
        f"permuted_{size}", text, "tokens shifted", size * math.log2(size),
        rows=np.where(inside, there, -1), least_met=_SOME,
    )  # fmt: skip


def _agreements(
    site: Site, part: Int64[np.ndarray, "tokens"] | None = None
) -> tuple[Int64[np.ndarray, "lags"], Int64[np.ndarray, "lags parts"]]:
    """Differing tokens that hold A's set of the token at each lag, counted by document, or part.

    Lags by which a token of another document would be meant count nowhere.
    """
    document = site.document
    part = document if part is None else part
    number = int(part.max()) + 1
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
        counts[place] = np.bincount(part[at[same]], minlength=number)
    return lags, counts


def _number(document: Integer[np.ndarray, "tokens"]) -> Int64[np.ndarray, "tokens"]:
    return np.unique(document, return_inverse=True)[1].ravel().astype(np.int64)


def _names(sets: Int32[np.ndarray, "tokens k"]) -> UInt64[np.ndarray, "tokens"]:
    """A number for each set, the same for equal ones; for others too, once in 2^64 pairs."""
    draws = np.random.default_rng(0).integers(1, 2**63, int(sets.max(initial=0)) + 2, np.uint64)
    return draws[sets].sum(axis=1, dtype=np.uint64)


@operator
def layers_shifted(site: Site) -> Iterator[Proposal]:
    """Choices of another layer: of that whose sets most often are B's where it differs."""
    rows, experts = np.flatnonzero(site.differs), len(site.matching)
    theirs, best = _names(site.theirs[rows]), (0.0, site.number)
    for number, other in enumerate(site.routers):
        if number == site.number or other.rule.top_k != site.theirs.shape[1]:
            continue
        if other.num_experts == experts and len(rows):
            share = float((_names(site.chosen_at(number)[rows]) == theirs).mean())
            best = max(best, (share, number), key=lambda one: one[0])
    if best[0] == 0.0:
        return
    chosen = site.chosen_at(best[1])
    text = f"choices of layer {site.routers[best[1]].layer} in place of {site.router.layer}"
    yield Proposal(
        "layers", text, "layers shifted", 4.0 + math.log2(len(site.routers)),
        scores=lambda there, rows: of_sets(chosen[rows], experts),
    )  # fmt: skip


@operator
def repeated(site: Site) -> Iterator[Proposal]:
    """Repeated rows: B's record of a token is that of the token before."""
    before = site.shifted(-1)
    has_before, row = before >= 0, np.maximum(before, 0)
    if not has_before.any() or _mostly_one_set(site):
        return

    def values(there: Site, rows: np.ndarray) -> np.ndarray:
        assert there.recorded is not None
        return np.where(has_before[rows, None], there.recorded.values[row[rows]], np.nan)

    def scores(there: Site, rows: np.ndarray) -> np.ndarray:
        return of_sets(there.theirs[row[rows]], len(there.matching), has_before[rows])

    name, text, cause = "repeated", "a row of B again (that of the token before)", "rows repeated"
    yield Proposal(name, text, cause, 1.0, scores=scores, values=values, least_met=_EXACT)


def _mostly_one_set(site: Site) -> bool:
    """Whether half of the rows that differ hold one set: it is written again, no row is."""
    _, counts = np.unique(_names(site.theirs[site.differs]), return_counts=True)
    return len(counts) > 0 and 2 * int(counts.max()) > int(counts.sum())


@operator
def one_set(site: Site) -> Iterator[Proposal]:
    """One and the same set for many of the tokens that differ: a fill value."""
    rows = np.sort(site.theirs[site.differs], axis=1)
    if len(rows) < _LEAST:
        return
    sets, counts = np.unique(rows, axis=0, return_counts=True)
    most = int(counts.argmax())
    if counts[most] < max(_LEAST, _ONE_SET * len(rows)):
        return
    bits, experts = sets.shape[1] * math.log2(len(site.matching)), len(site.matching)
    text = f"one and the same set ({', '.join(map(str, sets[most].tolist()[:8]))})"
    one = Proposal(
        "one_set", text, "padding counted", bits, least_met=_EXACT, everywhere=True,
        scores=lambda there, rows: of_sets(np.tile(sets[most], (len(rows), 1)), experts),
    )  # fmt: skip
    yield one
    if np.array_equal(sets[most], np.arange(sets.shape[1])):
        text, cause = f"{text}, as of equal scores or NaN", "ties broken by number"
        yield dataclasses.replace(
            one, name="first_set", text=text, cause=cause, bits=_OF_TIES, everywhere=False
        )  # fmt: skip


#: Integers that are too narrow for many experts: bits that are kept, or the largest number.
_NARROW = {
    "cut to 7 bits, as in int8": lambda numbers: numbers & 0x7F,
    "cut to 8 bits, as in uint8": lambda numbers: numbers & 0xFF,
    "127 at most, as in int8": lambda numbers: np.minimum(numbers, 127),
    "255 at most, as in uint8": lambda numbers: np.minimum(numbers, 255),
}


@operator
def narrow(site: Site) -> Iterator[Proposal]:
    """Expert ids truncated by a narrow integer type, so that several experts share an id."""
    numbers = np.arange(len(site.matching))
    is_repeated = bool((np.diff(np.sort(site.theirs, axis=1), axis=1) == 0).any())
    ways = {words: narrowed(numbers) for words, narrowed in _NARROW.items()}
    if 0 < (most := int(site.theirs[site.differs].max(initial=0)) + 1) < len(numbers):
        for count in {most, *(len(numbers) // ranks for ranks in (2, 4, 8, 16))}:
            if most <= count < len(numbers):
                ways[f"modulo {count}, as those of a rank"] = numbers % count
    for words, name in ways.items():
        if np.array_equal(name, numbers):
            continue

        def scores(there: Site, rows: np.ndarray, name: np.ndarray = name) -> np.ndarray:
            return _best_of(there.selection[rows], name)

        def values(there: Site, rows: np.ndarray, name: np.ndarray = name) -> np.ndarray:
            assert there.recorded is not None
            each = _best_of(there.recorded.of_each(there.router, there.logits[rows]), name)
            expert = there.recorded.experts(there.theirs[rows], each.shape[1])
            return np.take_along_axis(each, expert, axis=1).astype(np.float64)

        text, cause = f"numbers of experts {words}", "experts renamed"
        if is_repeated:  # which no top-k of other scores makes
            grid = of_sets(name[site.mine], len(numbers))
            yield Proposal(
                f"narrow {words}", text, cause, 2.0, scores=lambda _, rows, grid=grid: grid[rows]
            )
            continue
        yield Proposal(f"narrow {words}", text, cause, 2.0, scores=scores, values=values)


def _best_of(
    scores: Float[np.ndarray, "tokens experts"], name: Int64[np.ndarray, "experts"]
) -> Float[np.ndarray, "tokens experts"]:
    """The best score among the experts that share each id."""
    best = np.full_like(scores, -np.inf)
    for expert, number in enumerate(name):
        best[:, number] = np.maximum(best[:, number], scores[:, expert])
    return best


@operator
def one_more(site: Site) -> Iterator[Proposal]:
    """Top-(k + 1) choices of which the k lowest ids are written."""
    k, experts = site.theirs.shape[1], len(site.matching)
    if not site.has_logits or k + 1 >= experts:
        return
    best = np.argpartition(site.selection, experts - k - 1, axis=1)[:, experts - k - 1 :]
    lowest = np.sort(best, axis=1)[:, :k]
    yield Proposal(
        "one_more", f"top {k + 1} chosen, the {k} of lowest number written", "rule differs", 2.0,
        scores=lambda there, rows: of_sets(lowest[rows], experts),
    )  # fmt: skip


#: Batches in which places are counted, beside all tokens and each document: tokens in a row.
_IN_A_ROW = tuple(2**power for power in range(5, 15))

#: Experts that stop at the highest load of their batch, beyond the one that has it anyway: share
#: of all that a kind of batch needs, and kinds that are tried. Heuristic.
_STOPPED, _MOST_KINDS = 0.1, 3

#: Bits that say how many places an expert of one batch has.
_PLACES = 8.0


@operator
def filled(site: Site) -> Iterator[Proposal]:
    """Overflow by order or by score, in batches whose loads stop at one capacity."""
    if not site.has_logits:
        return
    tokens = len(site.theirs)
    kinds = {"all tokens": np.zeros(tokens, np.int64)}
    kinds["each document"] = site.document
    for size in _IN_A_ROW:
        if size < tokens:
            kinds[f"each batch of {size:,}"] = np.arange(tokens) // size
    load_in = {words: _loads(site, batch) for words, batch in kinds.items()}
    stopped = {words: _stopped(load) for words, load in load_in.items()}
    for words in sorted(kinds, key=lambda words: -stopped[words])[:_MOST_KINDS]:
        if stopped[words] < _STOPPED:
            continue
        batch, load = kinds[words], load_in[words]
        bits = _PLACES * len(load) + math.log2(len(kinds))
        fulls = {"later": _full_before(site, batch, load), "weaker": _full_above(site, batch, load)}
        for order, is_full in fulls.items():
            if not is_full.any():
                continue

            def scores(there: Site, rows: np.ndarray, is_full: np.ndarray = is_full) -> np.ndarray:
                own = there.selection[rows]
                return np.where(is_full[rows], own.dtype.type(-np.inf), own)

            name = f"filled {order} {words}"
            text = f"experts full within {words}, the {order} ones sent to the next best"
            yield Proposal(name, text, "capacity", own_bits=bits, scores=scores)


def _loads(site: Site, batch: Int64[np.ndarray, "tokens"]) -> Int64[np.ndarray, "batches experts"]:
    number = batch[:, None] * len(site.matching) + site.theirs
    size = (int(batch.max()) + 1) * len(site.matching)
    return np.bincount(number.ravel(), minlength=size).reshape(-1, len(site.matching))


def _stopped(load: Int64[np.ndarray, "batches experts"]) -> float:
    """Share of the experts with the highest load of their batch, beside the one of each batch."""
    batches, experts = load.shape
    most = load == load.max(axis=1, keepdims=True)
    return float((most.sum() - batches) / (batches * max(experts - 1, 1)))


def _full_before(
    site: Site, batch: Int64[np.ndarray, "tokens"], load: Int64[np.ndarray, "batches experts"]
) -> Bool[np.ndarray, "tokens experts"]:
    """Experts that earlier tokens of the batch have filled to its highest load."""
    order = np.argsort(batch, kind="stable")
    is_chosen = chosen_mask(site.theirs[order], load.shape[1])
    until = np.cumsum(is_chosen, axis=0) - is_chosen  # of all batches so far
    before = np.cumsum(load, axis=0) - load
    is_full = np.empty(is_chosen.shape, bool)
    there = batch[order]
    is_full[order] = until - before[there] >= load.max(axis=1)[there][:, None]
    return is_full


def _full_above(
    site: Site, batch: Int64[np.ndarray, "tokens"], load: Int64[np.ndarray, "batches experts"]
) -> Bool[np.ndarray, "tokens experts"]:
    """Experts at the highest load of the batch, for tokens below all that they have taken."""
    is_chosen = chosen_mask(site.theirs, load.shape[1])
    lowest = np.full(load.shape, np.inf)
    np.minimum.at(lowest, batch, np.where(is_chosen, site.selection, np.inf))
    is_at_most = load == load.max(axis=1, keepdims=True)
    return is_at_most[batch] & ~is_chosen & (site.selection < lowest[batch])


#: Bits that say how often one expert is chosen.
_LOAD_BITS = 8.0


@operator
def loads(site: Site) -> Iterator[Proposal]:
    """Scores from expert loads alone: a fault that predicts B no better explains nothing."""
    experts = len(site.matching)
    ways = {"loads": site.theirs, "loads_where_different": site.theirs[site.differs]}
    for name, theirs in ways.items():
        load = np.bincount(theirs.ravel(), minlength=experts)[:experts]
        # an expert that stands in a row twice is in more rows than there are
        others = np.maximum(len(theirs) - load, 0)
        score = np.log((load + 0.5) / (others + 0.5)).astype(np.float32)
        yield Proposal(
            name, "the same experts whatever the token", "unrelated", own_bits=_LOAD_BITS * experts,
            scores=lambda there, rows, score=score: np.broadcast_to(score, (len(rows), experts)),
        )  # fmt: skip
