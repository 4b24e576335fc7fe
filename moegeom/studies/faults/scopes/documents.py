"""Some documents; those of an engine are its requests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.studies.faults.scope import Scope, TokenRegion, Where, some_documents, sums


def _documents(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    names, group = where.documents
    if len(names) < 2 or names[0] < 0:
        return
    chosen, text, bits = some_documents(sums(saved, group), names, len(names) - 1)
    yield TokenRegion(np.isin(group, chosen), text, bits)


DOCUMENTS = Scope("documents", _documents)
