"""What the flips between A and B do to the output of the experts of A, router by router."""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_limits

from moegeom.core.shapes import Int64
from moegeom.engine.jumps import set_change, why_no_jumps
from moegeom.engine.session import Session
from moegeom.router.expert_functions import CountedExperts, open_expert_functions
from moegeom.studies.explain.layer import MatchedChoices
from moegeom.studies.explain.record import OutputChange
from moegeom.studies.explain.sides import Sides

#: Flipped tokens of a router whose experts are applied: evenly spread over all of them.
_MOST = 512


def flip_cost(choice: MatchedChoices, sides: Sides, opened: Session) -> OutputChange:
    """The change of the output where B's experts take the place of A's, for A's inputs.

    The weights of both are A's; so are the inputs, which B may not have had. ``reason`` says why
    nothing is known.
    """
    router = choice.prepared.router
    flipped = np.flatnonzero(~choice.agrees & (choice.other >= 0).all(axis=1))
    reason = why_no_jumps(router, sides.source.facts)
    if choice.other.shape[1] != choice.mine.shape[1]:
        reason = "B chooses another number of experts"
    if reason or not len(flipped):
        return OutputChange(router.name, len(flipped), reason=reason)
    experts = CountedExperts(open_expert_functions(opened.store, router))
    row = _spread(flipped)
    with threadpool_limits(1, user_api="blas"):  # the arithmetic of the scan
        inputs = [batch.values for batch in sides.batches(choice.prepared, row)]
    values = np.concatenate([part for part in inputs if part is not None])
    mine, theirs = choice.mine[row], choice.other[row]
    change, length = set_change(router, values, mine, theirs, experts.mixed)
    seen = length > 0.0
    over = change[seen] / length[seen]
    return OutputChange(
        router=router.name,
        num_flipped=len(flipped),
        num_looked=int(seen.sum()),
        over_output=float(over.mean()) if seen.any() else None,
        share=len(flipped) / len(choice.agrees),
        experts_read=experts.facts["experts_read"],
        expert_bytes=experts.facts["expert_bytes"],
    )


def _spread(rows: Int64[np.ndarray, "flipped"]) -> Int64[np.ndarray, "some"]:
    """At most ``_MOST`` of the rows, evenly spaced."""
    if len(rows) <= _MOST:
        return rows
    return rows[np.linspace(0, len(rows) - 1, _MOST).astype(np.int64)]
