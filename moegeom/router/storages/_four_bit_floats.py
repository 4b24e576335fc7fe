"""Four-bit floats (E2M1), two to a byte, the first one in the low half."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Shaped

#: OCP Microscaling Formats 1.0, section 5.3.3: sign, two bits of exponent, one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)


def unpack_e2m1(
    packed: Shaped[np.ndarray, "rows bytes"],
) -> Float32[np.ndarray, "rows columns"]:
    """The numbers of each row, twice as many as it has bytes."""
    raw = packed.view(np.uint8)
    halves = np.stack([raw & 0xF, raw >> 4], axis=-1)
    return _VALUES[halves.reshape(raw.shape[0], 2 * raw.shape[1])]
