"""Margins, those of groups among them at half their size, in bins cut at powers of two."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._counters import histogram_of


def _tightness(batch: TokenBatch) -> np.ndarray:
    assert batch.tightness is not None
    return batch.tightness


REDUCTION = histogram_of("tightness_histogram", ("margin",), _tightness, use=Use(of_switch=True))
