"""Tokens whose choice two correct float32 engines may make differently."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import Kernels, Use
from moegeom.kernels.reductions._counters import counters

#: Columns of the counter array.
BOUNDED, AMBIGUOUS = range(2)


def _fold(counts: np.ndarray, quantities: Quantities, kernels: Kernels) -> None:
    tightness, bound = quantities.tightness, quantities.float_bound
    assert tightness is not None and bound is not None
    counts[..., BOUNDED] += quantities.count_labels(len(counts))
    counts[..., AMBIGUOUS] += quantities.count_labels(len(counts), tightness <= bound)


REDUCTION = counters(
    "ambiguity",
    ("margin", "float_bound", "input_norm"),
    lambda extent: (2,),
    _fold,
    use=Use(on_prior=True),
)
