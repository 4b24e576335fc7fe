"""Margins, those of groups among them at half their size, in bins cut at powers of two."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._counters import histogram_of


def _effective_margin(batch: TokenBatch) -> np.ndarray:
    assert batch.effective_margin is not None
    return batch.effective_margin


REDUCTION = histogram_of(
    "effective_margin_histogram", ("margin",), _effective_margin, use=Use(of_flip=True)
)
