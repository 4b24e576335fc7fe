"""Margins, those of groups among them at half their size, in bins cut at powers of two."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._counters import histogram_of


def _tightness(quantities: Quantities) -> np.ndarray:
    assert quantities.tightness is not None
    return quantities.tightness


REDUCTION = histogram_of("tightness_histogram", ("margin",), _tightness, use=Use(of_switch=True))
