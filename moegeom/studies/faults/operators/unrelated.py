"""Choices independent of the inputs: each expert with its frequency in B."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.studies.faults.operator import Operator, Proposal, Site

#: Bits that say how often one expert is chosen.
_LOAD_BITS = 8.0


def _loads(site: Site) -> Iterator[Proposal]:
    """Scores from expert loads alone: a fault that predicts B no better explains nothing."""
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
