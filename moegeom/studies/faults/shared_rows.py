"""Logits of a router all of whose rows are those of routers that have been evaluated.

In products of one shape a column does not depend on the others, so that no bit changes. Oracle in
tests: the product itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moegeom.core.shapes import Float, Int64
from moegeom.variants.emulated import Emulated


def sources(wanted: Emulated, known: Sequence[Emulated]) -> Int64[np.ndarray, "experts"] | None:
    """For each expert the first of ``known`` that has its row and bias, and reads inputs alike.

    None where one expert has none.
    """
    found = np.full(wanted.columns.shape[1], -1)
    for number, one in enumerate(known):
        if _reads(one) != _reads(wanted) or (one.logit_bias is None) != (wanted.logit_bias is None):
            continue
        is_same = (one.columns == wanted.columns).all(axis=0)
        if one.logit_bias is not None and wanted.logit_bias is not None:
            is_same &= one.logit_bias == wanted.logit_bias
        found[(found < 0) & is_same] = number
    return found if (found >= 0).all() else None


def _reads(emulated: Emulated) -> tuple[str, str]:
    return emulated.arithmetic.input, emulated.arithmetic.operands


def composed(
    source: Int64[np.ndarray, "experts"], logits: Sequence[Float[np.ndarray, "tokens experts"]]
) -> Float[np.ndarray, "tokens experts"]:
    """The logits of each expert from those of its source."""
    found = np.empty_like(logits[0])
    for number in np.unique(source):
        found[:, source == number] = logits[number][:, source == number]
    return found
