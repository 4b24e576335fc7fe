"""Routing weight that a variant moves to other experts, in bins cut at powers of two."""

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._counters import histogram_of


def _moved(batch: TokenBatch) -> np.ndarray:
    assert batch.flip is not None
    return np.nan_to_num(batch.flip.weight_moved)


REDUCTION = histogram_of("weight_moved_histogram", ("flip",), _moved, use=Use(of_flip=True))
