"""Logits of a router whose rows all occur in routers that are evaluated already.

In products of one shape a column does not depend on the others, so that no bit changes. Oracle in
tests: the product itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moegeom.core.shapes import Float, Int64
from moegeom.variants.emulated import Emulated


def sources(router: Emulated, others: Sequence[Emulated]) -> Int64[np.ndarray, "experts"] | None:
    """For each expert the first of ``others`` that has its row and bias, and reads inputs alike.

    None where one expert has none.
    """
    source = np.full(router.columns.shape[1], -1)
    for number, one in enumerate(others):
        if _reads(one) != _reads(router) or (one.logit_bias is None) != (router.logit_bias is None):
            continue
        is_same = (one.columns == router.columns).all(axis=0)
        if one.logit_bias is not None and router.logit_bias is not None:
            is_same &= one.logit_bias == router.logit_bias
        source[(source < 0) & is_same] = number
    return source if (source >= 0).all() else None


def _reads(emulated: Emulated) -> tuple[str, str]:
    return emulated.arithmetic.input, emulated.arithmetic.operands


def composed(
    source: Int64[np.ndarray, "experts"], logits: Sequence[Float[np.ndarray, "tokens experts"]]
) -> Float[np.ndarray, "tokens experts"]:
    """The logits of each expert from those of its source."""
    columns = np.empty_like(logits[0])
    for number in np.unique(source):
        columns[:, source == number] = logits[number][:, source == number]
    return columns
