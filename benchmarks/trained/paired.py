"""Differences between two methods that were trained on the same seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.core.text import half_width

NOT_SEEN = "not seen at this size"


@dataclass(frozen=True)
class Difference:
    """Mean of the differences, and half the width of its 95 % t interval."""

    mean: float
    half: float
    pairs: int

    @property
    def is_seen(self) -> bool:
        """Whether the interval leaves 0 out; two pairs are the least that have one."""
        return math.isfinite(self.half) and abs(self.mean) > self.half


def paired(values: Sequence[float], base: Sequence[float]) -> Difference:
    """The difference of two methods over seeds that both were trained with, in their order.

    Mean difference, and Student's quantile for n - 1 times its standard error; nan for one pair.
    Oracle in tests: scipy.stats.ttest_rel.
    """
    differences = np.asarray(values, np.float64) - np.asarray(base, np.float64)
    pairs = len(differences)
    if pairs < 2:
        return Difference(float(differences.mean()) if pairs else math.nan, math.nan, pairs)
    error = float(differences.std(ddof=1)) / math.sqrt(pairs)
    return Difference(float(differences.mean()), half_width(error, pairs), pairs)


def difference_text(found: Difference, digits: int) -> str:
    """``-0.021 +- 0.009``, or that nothing was seen, with what was measured."""
    said = f"{found.mean:+.{digits}f}"
    if not math.isfinite(found.half):
        return f"{said}, of {found.pairs} pair"
    said = f"{said} +- {found.half:.{digits}f}"
    return said if found.is_seen else f"{NOT_SEEN} ({said})"


def spread_text(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation over seeds; the mean alone of one."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} +- {float(np.std(values, ddof=1)):.{digits}f}"
