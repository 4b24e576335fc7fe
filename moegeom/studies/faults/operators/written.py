"""Choices that are right and written down wrongly: other numbers, other tokens, no tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moegeom.geometry.rows import common_choices, expert_matching
from moegeom.studies.faults.operator import Operator, Proposal, Site, of_sets

#: Tokens by which rows may stand too far, and layers.
_MOST_SHIFT = 8

#: B's most frequent set is no choice where it makes up this share of what differs, at least so
#: many tokens, and A hardly ever chose it.
_ONE_SET, _LEAST = 0.02, 5

#: A copy of something is equal to it, but for a token at the border of where it is.
_EXACT = 0.9


def _renamed(site: Site) -> Iterator[Proposal]:
    """Numbers that fit all tokens best, and those that fit the tokens with other sets best."""
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
    for by in range(-_MOST_SHIFT, _MOST_SHIFT + 1):
        rows = site.shifted(by) if by else None
        if rows is None or not (rows >= 0).any():
            continue
        way = "after" if by > 0 else "before"
        text = f"rows of the token {abs(by)} {way}"
        yield Proposal(f"tokens{by:+d}", text, "tokens shifted", 4.0, rows=rows)


TOKENS_SHIFTED = Operator("tokens_shifted", _shifted)


def _layers(site: Site) -> Iterator[Proposal]:
    for number, other in enumerate(site.routers):
        apart = number - site.number
        if not apart or abs(apart) > _MOST_SHIFT:
            continue
        if other.rule.top_k != site.theirs.shape[1] or other.num_experts != len(site.matching):
            continue
        chosen = site.chosen_at(number)
        known = np.ones(len(chosen), bool)

        def scores(there: Site, chosen: np.ndarray = chosen, known: np.ndarray = known):
            return of_sets(chosen, len(there.matching), known)

        text = f"choices of the layer {abs(apart)} {'further on' if apart > 0 else 'before'}"
        yield Proposal(f"layers{apart:+d}", text, "layers shifted", 4.0, scores=scores)


LAYERS_SHIFTED = Operator("layers_shifted", _layers)


def _repeated(site: Site) -> Iterator[Proposal]:
    """A row that stays: B holds for this token what it held for the one before."""
    before = site.shifted(-1)
    known = before >= 0
    if not known.any():
        return
    sets = site.theirs[np.maximum(before, 0)]

    def scores(there: Site) -> np.ndarray:
        return of_sets(sets, len(there.matching), known)

    text = "a row of B again (that of the token before)"
    yield Proposal("repeated", text, "rows repeated", 1.0, scores=scores, least_met=_EXACT)


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
    one = np.broadcast_to(sets[most], site.theirs.shape)
    known = np.ones(len(one), bool)

    def scores(there: Site) -> np.ndarray:
        return of_sets(one, len(there.matching), known)

    bits = sets.shape[1] * math.log2(len(site.matching))
    named = ", ".join(map(str, sets[most].tolist()[:8]))
    text = f"one and the same set ({named})"
    yield Proposal(
        "one_set", text, "padding counted", own_bits=bits, scores=scores,
        least_met=_EXACT, everywhere=True,
    )  # fmt: skip


ONE_SET = Operator("one_set", _one_set)
