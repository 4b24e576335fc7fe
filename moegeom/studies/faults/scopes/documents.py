"""Some documents, which requests of an engine are."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float64

from moegeom.geometry.set_code import log2_sets
from moegeom.studies.faults.scope import Scope, TokenRegion, Where, listed, sums

#: Documents that are named.
_NAMED = 8


def _documents(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    names, group = np.unique(where.document, return_inverse=True)
    if len(names) < 2 or names[0] < 0:
        return
    of_each = sums(saved, group)
    order = np.argsort(-of_each, kind="stable")
    count = np.arange(1, len(names))
    cost = np.array([log2_sets(len(names), int(m)) for m in count]) + math.log2(len(names))
    best = int((np.cumsum(of_each[order])[:-1] - cost).argmax())
    chosen = np.sort(order[: best + 1])
    named = f" ({listed(names[chosen])})" if len(chosen) <= _NAMED else ""
    text = f"{len(chosen)} of {len(names)} documents{named}"
    yield TokenRegion(np.isin(group, chosen), text, float(cost[best]))


DOCUMENTS = Scope("documents", _documents)
