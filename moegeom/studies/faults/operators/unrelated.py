"""Choices that have nothing to do with what is read: each expert as often as B chose it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.studies.faults.operator import Operator, Proposal, Site

#: Bits that say how often one expert is chosen.
_LOAD_BITS = 8.0


def _loads(site: Site) -> Iterator[Proposal]:
    """What predicts B no better than the loads of its experts explains nothing."""
    experts = len(site.matching)
    ways = {"loads": site.theirs, "loads_where_different": site.theirs[site.differs]}
    for name, theirs in ways.items():
        load = np.bincount(theirs.ravel(), minlength=experts)[:experts]
        score = np.log((load + 0.5) / (len(theirs) - load + 0.5)).astype(np.float32)

        def scores(there: Site, rows: np.ndarray, score: np.ndarray = score) -> np.ndarray:
            return np.broadcast_to(score, (len(rows), experts))

        text = "the same experts whatever the token"
        yield Proposal(name, text, "unrelated", own_bits=_LOAD_BITS * experts, scores=scores)


LOADS = Operator("loads", _loads)
