"""Precision of stored dtypes."""

from __future__ import annotations

_EXPLICIT_BITS = {"F64": 52, "F32": 23, "F16": 10, "BF16": 7, "F8_E4M3": 3, "F8_E5M2": 2}


def mantissa_bits(dtype: str) -> int | None:
    """Explicit mantissa bits of a dtype spelled as in safetensors; None for what is no float."""
    return _EXPLICIT_BITS.get(dtype.upper())
