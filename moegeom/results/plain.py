"""Cells of the results as plain Python values."""

from __future__ import annotations

import math
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
