"""Integers of a few bits, packed into words of 32."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32, UInt8


def unpack_rows(
    words: Int32[np.ndarray, "words columns"], bits: int
) -> UInt8[np.ndarray, "values columns"]:
    """Unsigned integers of ``bits`` bits (1 to 8), packed densely down the rows.

    The values of a column are one string of bits, lowest first; where ``bits`` does not divide 32
    some lie across two words. Values of the last words are returned even if they only pad.
    """
    num_words, columns = words.shape
    # 32 values take ``bits`` words, after which the pattern starts anew.
    num_runs = -(-num_words // bits)
    padded = np.zeros((num_runs * bits, columns), np.uint32)
    padded[:num_words] = words.view(np.uint32)
    runs = padded.reshape(num_runs, bits, columns)
    values = np.empty((num_runs, 32, columns), np.uint8)
    for place in range(32):
        word, shift = divmod(place * bits, 32)
        value = runs[:, word] >> np.uint32(shift)
        if shift + bits > 32:
            value |= runs[:, word + 1] << np.uint32(32 - shift)
        values[:, place] = value & np.uint32((1 << bits) - 1)
    return values.reshape(num_runs * 32, columns)[: num_words * 32 // bits]


def num_words(values: int, bits: int) -> int:
    """Words that hold so many values."""
    return -(-values * bits // 32)
