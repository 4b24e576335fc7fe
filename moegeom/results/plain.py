"""Cells of the results as plain Python values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def plain_value(value: Any) -> Any:
    """A list, number, text, truth value or None; nan is None."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value


def plain_column(values: Sequence[Any] | np.ndarray) -> list[Any]:
    """The same for each value of a column, at the speed of the whole."""
    if not isinstance(values, np.ndarray):
        return [plain_value(value) for value in values]
    if values.dtype.kind != "f":
        return values.tolist()
    return [None if value != value else value for value in values.tolist()]
