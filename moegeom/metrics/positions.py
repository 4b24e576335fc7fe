"""What the first tokens of some documents choose, position by position.

The first documents of the stream, at most four, numbered in their order, and of each the first 256
tokens: which experts, with which routing weights. No token ids, no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions.samples import FIRST_POSITIONS

#: Documents that are kept.
MOST_DOCUMENTS = 4


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    found = reductions["beginnings"]
    if facts.is_random or not facts.is_whole or not len(found["document"]):
        return {}
    numbers = np.unique(found["document"])[:MOST_DOCUMENTS]
    row = np.flatnonzero(np.isin(found["document"], numbers))
    row = row[np.lexsort((found["position"][row], found["document"][row]))]
    slots = found["chosen"].shape[1]
    return {
        "positions": {
            "document_number": np.repeat(np.searchsorted(numbers, found["document"][row]), slots),
            "position": np.repeat(found["position"][row], slots),
            "expert": found["chosen"][row].ravel(),
            "weight": found["weights"][row].ravel(),
        },
    }


METRIC = Metric(
    name="positions",
    version=1,
    text=f"Experts and routing weights of the first {FIRST_POSITIONS} tokens of the first "
    f"{MOST_DOCUMENTS} documents.",
    scope="router",
    needs=("beginnings",),
    columns={
        "positions": (
            Column("document_number", "document, in their order in the stream", "", "int"),
            Column("position", "position of the token in its document", "tokens", "int"),
            Column("expert", "an expert that the token chose", "expert", "int"),
            Column("weight", "its routing weight"),
        ),
    },
    finish=_finish,
    is_for_figures=True,
)
